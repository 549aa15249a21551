"""What clients talk to: the HTTP API, from a connection to the text of an answer.

Imports `http_kit`, `process`, `protocol`, `checkpoint`, and of `router` only its interface. Its
packages, from the top: `api`, `chat`, `output`, `grammars`, then `http` and `text`, then
`admission`.
"""
