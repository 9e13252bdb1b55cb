"""Decoders that take the rows as they are: one module each. Importing this package imports none of them."""
