"""Everything with a table and everything a person sees.

The Celery application is imported here so that every process that imports the package (web, worker, a shell) sends and
receives tasks through the same broker and the same rules.
"""

from marketplace.celery import app as celery_app

__all__ = ["celery_app"]
