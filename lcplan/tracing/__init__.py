"""The trace method: the real modeling and loss code under FakeTensorMode, with every live storage counted."""
