"""The models: a decoder of which every supported architecture is a configuration."""
