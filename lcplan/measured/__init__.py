"""Recorded training steps, one JSON line each; ``load_rows`` reads them."""
