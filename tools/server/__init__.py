"""`vkbackend serve`: an HTTP server for one model.

`app.py` routes a request, `guard.py` and `body.py` check it, and one file per API answers it. `model.py`
opens and reopens the model. The server needs the extra `serve`.
"""
