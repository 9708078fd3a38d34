# The agent and its trainer, for an island that runs containers. TORCH_ARGS chooses another build of torch.
FROM python:3.11-slim-bookworm
ARG TORCH=torch==2.13.0
ARG TORCH_ARGS=
RUN useradd --create-home --uid 10002 agent && install -d -o agent /var/lib/archipelago-agent
COPY requirements/trainer.txt /tmp/trainer.txt
RUN pip install --no-cache-dir --require-hashes -r /tmp/trainer.txt && pip install --no-cache-dir ${TORCH_ARGS} ${TORCH}
COPY worker_agent /tmp/worker_agent
RUN pip install --no-cache-dir --no-deps /tmp/worker_agent && rm -r /tmp/worker_agent
COPY --chmod=755 deploy/agent-entrypoint.sh /usr/local/bin/agent-entrypoint
USER agent
ENV PYTHONUNBUFFERED=1 ARCHIPELAGO_HOME=/var/lib/archipelago-agent
VOLUME /var/lib/archipelago-agent
ENTRYPOINT ["agent-entrypoint"]
