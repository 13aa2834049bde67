"""`vkbackend serve`: an HTTP server in front of one model.

app.py routes a request, guard.py and body.py check it, one file per API answers it. model.py opens the model,
and reopens it after a loss. Needs the extra `serve`.
"""
