"""The four axes of a technique and the pieces that several papers share; see ``base``."""
