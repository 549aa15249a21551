"""Handoffs: who may write which blocks, and until when.

Pure state machines: time is an argument, and no transport is known here.
"""
