"""An HTTP server with OpenAI's interface: completions and chats, at once or as a stream.

`serving` keeps the ranks together, `protocol` reads bodies and writes answers, `app` is the ASGI
application, `connections` the limits below it.
"""
