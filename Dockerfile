# One image for the three processes. What changes rarely is installed first: an edit of our code does not reinstall torch.
#
# TORCH is a version, as with make: 2.13.0+cpu leaves out the CUDA libraries that pip would fetch on x86-64. Where the
# usual index does not hold that version, PIP_EXTRA_INDEX_URL names one that does. EXTRAS=cuda makes the image for a GPU.

FROM python:3.11-slim-bookworm AS requirements
ARG EXTRAS
COPY pyproject.toml .
RUN python -c 'import os, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        extras = [project["optional-dependencies"][name] for name in os.environ.get("EXTRAS", "").split(",") if name]; \
        print(*project["dependencies"], *sum(extras, []), sep="\n")' \
    > /requirements.txt

FROM python:3.11-slim-bookworm AS environment
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/pagekeeper/bin:$PATH
ARG TORCH
ARG PIP_EXTRA_INDEX_URL
# Cached by the content of that file, so that only a change of the dependencies themselves comes back here. The headers
# and test programs inside torch are a fifth of it.
COPY --from=requirements /requirements.txt /
RUN python -m venv /opt/pagekeeper \
    && pip install ${TORCH:+"torch==$TORCH"} --requirement /requirements.txt \
    && cd /opt/pagekeeper/lib/python*/site-packages/torch \
    && rm -rf include test bin/protoc* bin/test_* bin/*Test

FROM environment AS package
COPY . /source
RUN pip install --no-deps --prefix /opt/package /source

FROM python:3.11-slim-bookworm
ARG EXTRAS
# Triton compiles the host's side of a kernel launch where it runs.
RUN if [ -n "$EXTRAS" ]; then \
        apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
# Whoever mounts a volume on the directory of the sockets gets its owner and mode with it.
RUN useradd --uid 10001 --user-group --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin pagekeeper \
    && install --directory --mode 0700 --owner pagekeeper --group pagekeeper /run/pagekeeper /var/cache/pagekeeper
COPY --from=environment /opt/pagekeeper /opt/pagekeeper
COPY --from=package /opt/package /opt/pagekeeper
ENV PATH=/opt/pagekeeper/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PAGEKEEPER_RUNTIME_DIR=/run/pagekeeper
USER 10001:10001
ENTRYPOINT ["pagekeeper"]
CMD ["--help"]
