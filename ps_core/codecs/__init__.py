"""Codecs of payloads that are more than a raw array."""
