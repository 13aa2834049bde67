"""`vkbackend serve`: an HTTP server in front of one model.

app.py takes a request, guard.py and body.py refuse what is wrong with it, a file per API answers it. model.py
owns the model, and opens it again where it is lost. Needs the extra `serve`.
"""
