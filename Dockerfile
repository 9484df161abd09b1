# The operator: python:3.11-slim, no root, nothing written outside /tmp.
FROM python:3.11-slim AS build
WORKDIR /source
COPY pyproject.toml README.md ./
COPY operator operator
COPY engine engine
# The engine's folder comes along for its message types only; none of the engine's requirements are installed.
RUN python -m venv /app && /app/bin/pip install --no-cache-dir '.[operator]'

FROM python:3.11-slim
COPY --from=build /app /app
ENV PATH=/app/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["weightsync-operator"]
