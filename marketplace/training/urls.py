"""Addresses of jobs: pages and API. Those of trainers are in agent_urls."""

from __future__ import annotations

from django.urls import path

from marketplace.training import api, web

app_name = "training"
urlpatterns = [
    path("jobs", web.jobs, name="jobs"),
    path("jobs/new", web.new_job, name="new_job"),
    path("jobs/preview", web.preview, name="preview"),
    path("jobs/<str:job_id>", web.job, name="job"),
    path("jobs/<str:job_id>/live", web.live, name="live"),
    path("jobs/<str:job_id>/curve.json", web.curve, name="curve"),
    path("jobs/<str:job_id>/cancel", web.cancel, name="cancel"),
    path("jobs/<str:job_id>/checkpoints/<str:artifact_id>", web.checkpoint, name="checkpoint"),
    path("api/v1/jobs", api.JobsView.as_view(), name="api_jobs"),
    path("api/v1/jobs/<str:job_id>", api.JobView.as_view(), name="api_job"),
    path("api/v1/jobs/<str:job_id>/cancel", api.JobCancelView.as_view(), name="api_job_cancel"),
    path("api/v1/jobs/<str:job_id>/events", api.JobEventsView.as_view(), name="api_job_events"),
    path("api/v1/jobs/<str:job_id>/metrics", api.JobMetricsView.as_view(), name="api_job_metrics"),
    path("api/v1/jobs/<str:job_id>/artifacts", api.JobArtifactsView.as_view(), name="api_job_artifacts"),
    path("api/v1/artifacts", api.ArtifactsView.as_view(), name="api_artifacts"),
    path("api/v1/artifacts/<str:artifact_id>", api.ArtifactView.as_view(), name="api_artifact"),
]
