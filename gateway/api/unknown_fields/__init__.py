"""Fields of bodies that Baton does not know or cannot honour: ignored and named, or refused.

Validation only notes that there is such a field; a body without one costs nothing more. Knows no
endpoint. Imports `protocol` and pydantic.
"""
