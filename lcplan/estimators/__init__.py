"""The items of the ledger, one pure function each, and the formula method that puts them together."""
