"""The interactive planner: `trigrid web`.

questions/  what the page asks and how it is answered, with the standard library only: it also runs in a browser
serve.py    a port that is listened on; server.py: the questions over HTTP, and the page
guard.py    who may ask, how much, and what headers go back
workers.py  processes that answer, so that none holds up the others; worker.py: such a process
openapi.py  the questions' types as OpenAPI
run/        a run's folder, read-only
export.py   the page as a folder of files, with sources.py and npm.py: what it is made of
page/       the page; site/: what stands in for the server where there is none
"""
