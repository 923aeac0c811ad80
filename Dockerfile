# One image for every role: `pushpull scheduler`, `pushpull server`, `pushpull worker SCRIPT`.
# `--target scheduler` has what a scheduler and the command line need, and no torch.
# Your own script: FROM pushpull:0.1.0, COPY train.py ./ (docs/guides/KUBERNETES.md).
# To pin the base for good, name it by digest: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS light
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
# Versions and hashes of all packages but torch (make image-lock).
COPY deploy/image/light.txt ./
RUN python -m venv --without-pip /opt/pushpull \
 && python -m pip --python /opt/pushpull/bin/python install --no-compile --no-deps --require-hashes -r light.txt \
 # A layer that is built again, anywhere, is the same to the byte: nothing in it has the time of day.
 && python -m compileall -f -q --invalidation-mode unchecked-hash /opt/pushpull/lib \
 && find /opt/pushpull -exec touch --no-dereference --date=@0 {} +

FROM light AS dependencies
COPY constraints.txt deploy/image/rest.txt ./
# Where pip looks for torch, and for torch alone, beside its own index: the CPU build is a tenth of
# the CUDA one. Empty takes what pip's own index has.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN install="python -m pip --python /opt/pushpull/bin/python install --no-compile" \
 && $install --no-deps --require-hashes -r rest.txt \
 && $install -c constraints.txt --no-deps ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
 # What a CUDA build needs besides: nothing is left of the CPU one's.
 && $install -c constraints.txt torch \
 # Programs, headers and tests that only a compiler or the packages' own tests would use.
 && cd /opt/pushpull/lib/python3*/site-packages \
 && rm -rf torch/include torch/share torch/test sympy/*/tests sympy/*/*/tests numpy/*/tests \
    networkx/*/tests networkx/*/*/tests torch/lib/*_test.so \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find . -name '*.a' -delete \
 # Some files are for another Python: pip passes over them, too.
 && { python -m compileall -f -qq --invalidation-mode unchecked-hash . || true; } \
 && find /opt/pushpull -exec touch --no-dereference --date=@0 {} +

FROM light AS code
COPY pyproject.toml README.md ./
COPY protos protos
COPY ps_cli ps_cli
COPY ps_core ps_core
COPY ps_runtime ps_runtime
COPY ps_server ps_server
COPY ps_worker ps_worker
COPY scheduler scheduler
COPY examples /layers/examples/srv/pushpull/examples
# Each package in a folder of its own, to be laid over the dependencies as a layer of its own: a change
# of code is a push of its package. A package that did not change is the same to the byte.
RUN python -m pip wheel --no-deps --wheel-dir dist . \
 && python -m pip --python /opt/pushpull/bin/python install --no-deps --no-compile --root /code dist/*.whl \
 && python -m compileall -q --invalidation-mode unchecked-hash -s /code /code \
 && cd /code/opt/pushpull/lib/python3*/site-packages \
 && for package in pushpull ps_core ps_runtime scheduler ps_cli ps_worker ps_server; do \
      mkdir -p "/layers/$package$(pwd | cut -c 6-)" && mv "$package" "/layers/$package$(pwd | cut -c 6-)"; \
    done \
 && mv /code /layers/rest \
 && chmod -R u=rwX,go=rX /layers/examples \
 && find /layers -exec touch --no-dereference --date=@0 {} +

FROM ${PYTHON_IMAGE} AS trimmed
RUN useradd --uid 10001 --no-create-home --home-dir /srv/pushpull --shell /usr/sbin/nologin pushpull \
 # Where volumes may be mounted: a new one takes over whose this is.
 && install --directory --owner=pushpull --group=pushpull /checkpoints /update-log /journal \
 && install --directory --owner=pushpull --group=pushpull --mode=0700 /run/pushpull \
 # No role reads these. Licences stay, and pip, for packages of your own.
 && rm -rf /usr/share/locale /usr/share/man /usr/share/info /var/lib/apt/lists/* \
 && find /usr/share/doc ! -type d ! -name copyright -delete \
 && find /var/cache /var/log -type f -delete \
 && cd "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" \
 && rm -rf test idlelib turtledemo ensurepip \
 && find / -xdev -type f -perm /6000 -exec chmod a-s {} +

# One layer without what was removed, whichever base is given.
FROM scratch AS base
COPY --from=trimmed / /
# Base images say so themselves; their Python is in one of the two.
ENV PATH=/opt/pushpull/bin:/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /srv/pushpull
# A number, so that Kubernetes can check runAsNonRoot without reading the image's /etc/passwd.
USER 10001:10001
CMD ["pushpull", "--help"]
# A role that serves /healthz says where in this variable; anything else in the image has none.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "\
import os, urllib.request; port = os.environ.get('PUSHPULL_HTTP_LISTEN', '').rpartition(':')[2]; \
port and urllib.request.urlopen(f'http://127.0.0.1:{port}/healthz', timeout=4)"]

FROM base AS scheduler
COPY --from=light /opt/pushpull /opt/pushpull
COPY --from=code /layers/pushpull /
COPY --from=code /layers/ps_core /
COPY --from=code /layers/ps_runtime /
COPY --from=code /layers/scheduler /
COPY --from=code /layers/ps_cli /
COPY --from=code /layers/ps_worker /
COPY --from=code /layers/ps_server /
COPY --from=code /layers/rest /
LABEL org.opencontainers.image.title="pushpull scheduler" \
      org.opencontainers.image.description="A scheduler of the parameter server pushpull, without torch" \
      org.opencontainers.image.version="0.1.0"

FROM base
COPY --from=dependencies /opt/pushpull /opt/pushpull
COPY --from=code /layers/examples /
COPY --from=code /layers/pushpull /
COPY --from=code /layers/ps_core /
COPY --from=code /layers/ps_runtime /
COPY --from=code /layers/scheduler /
COPY --from=code /layers/ps_cli /
COPY --from=code /layers/ps_worker /
COPY --from=code /layers/ps_server /
COPY --from=code /layers/rest /
LABEL org.opencontainers.image.title="pushpull" \
      org.opencontainers.image.description="A parameter server for PyTorch: scheduler, servers, workers" \
      org.opencontainers.image.version="0.1.0"
