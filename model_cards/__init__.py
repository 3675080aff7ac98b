"""The card templates; installed as `dex.model_cards`."""
