"""What `dex plan` is made of: shapes without weights, a training step without numbers, and devices."""
