# A vLLM worker for CPU with the Mooncake store: `docker build -f deploy/worker.Dockerfile -t moongate-worker .`
# On GPUs use vLLM's own image with the Mooncake wheel added; the flags in docker-compose.yml are the same.
FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 librdmacm1 libnuma1 libcurl4 libgomp1 \
    && rm -rf /var/lib/apt/lists/*

# torch must be its CPU build. Where the configured package index has only the CUDA build, name PyTorch's index
# of CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=
COPY constraints-vllm.txt /tmp/
RUN pip install --no-cache-dir --no-deps --requirement /tmp/constraints-vllm.txt \
    && useradd --system --home-dir /var/lib/vllm --create-home vllm

USER vllm
WORKDIR /var/lib/vllm
ENV PYTHONUNBUFFERED=1
EXPOSE 8000 5557 5558
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server"]
