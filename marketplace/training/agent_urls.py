"""The addresses of trainers' calls and of the local artifact store."""

from __future__ import annotations

from django.urls import path

from marketplace.training import agent_api, artifact_views

app_name = "training_agent"
urlpatterns = [
    path("api/agent/v1/training/join", agent_api.join, name="join"),
    path("api/agent/v1/training/poll", agent_api.poll, name="poll"),
    path("api/agent/v1/training/submit", agent_api.submit, name="submit"),
    path("api/agent/v1/training/applied", agent_api.applied, name="applied"),
    path("api/agent/v1/training/snapshot", agent_api.snapshot, name="snapshot"),
    path("api/agent/v1/training/leave", agent_api.leave, name="leave"),
    path("api/agent/v1/training/blobs", agent_api.put_blob, name="put_blob"),
    path("api/agent/v1/training/blob-urls", agent_api.blob_urls, name="blob_urls"),
    path("artifacts/<str:token>", artifact_views.artifact, name="artifact"),
]
