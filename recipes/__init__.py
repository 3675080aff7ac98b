"""The shipped recipes; installed as `dex.recipes`."""
