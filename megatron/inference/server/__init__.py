"""An HTTP server with OpenAI's interface: completions and chats, at once or as a stream.

`serving` keeps the ranks together, `protocol` reads bodies and `answers` writes what they ask for,
`app` is the ASGI application, `client` its side of a connection, `access` says who is answered,
`connections` has the limits below it.
"""
