# One image for every role: `pushpull scheduler`, `pushpull server`, `pushpull worker SCRIPT`.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# Where pip looks for torch, and for torch alone, beside its own index: the CPU build is a tenth of
# the CUDA one. Empty takes what pip's own index has.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
# Dependencies first, from the same two files as everywhere else: a change of code keeps this layer.
COPY pyproject.toml constraints.txt ./
RUN python -m venv --without-pip /opt/pushpull \
 && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print('\n'.join(project['dependencies'] + project['optional-dependencies']['examples']))" >requirements.txt \
 && install="python -m pip --python /opt/pushpull/bin/python install -c constraints.txt" \
 && $install --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
 && $install -r requirements.txt \
 # What only a compiler or the packages' own tests would use is half of the size.
 && cd /opt/pushpull/lib/python3*/site-packages \
 && rm -rf torch/include torch/share torch/test sympy/*/tests sympy/*/*/tests scipy/*/tests \
    scipy/*/*/tests sklearn/tests sklearn/*/tests networkx/*/tests networkx/*/*/tests \
 && find . -name '*.a' -delete
COPY README.md ./
COPY benchmarks benchmarks
COPY protos protos
COPY ps_cli ps_cli
COPY ps_core ps_core
COPY ps_runtime ps_runtime
COPY ps_server ps_server
COPY ps_worker ps_worker
COPY scheduler scheduler
RUN python -m pip wheel --no-deps --wheel-dir dist . \
 && python -m pip --python /opt/pushpull/bin/python install --no-deps dist/*.whl

FROM ${PYTHON_IMAGE}
RUN useradd --uid 10001 --no-create-home --home-dir /srv/pushpull --shell /usr/sbin/nologin pushpull \
 # Where volumes may be mounted: a new one takes over whose this is.
 && install --directory --owner=pushpull --group=pushpull /checkpoints /update-log /journal \
 && install --directory --owner=pushpull --group=pushpull --mode=0700 /run/pushpull
COPY --from=build /opt/pushpull /opt/pushpull
COPY examples /srv/pushpull/examples
ENV PATH=/opt/pushpull/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /srv/pushpull
# A number, so that Kubernetes can check runAsNonRoot without reading the image's /etc/passwd.
USER 10001:10001
CMD ["pushpull", "--help"]
