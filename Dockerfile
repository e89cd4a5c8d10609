# docker build -t dsim . && docker run --rm -v "$PWD:/work" dsim replay azure-conv --policy optimus -o runs/azure
FROM python:3.12-slim
COPY . /tmp/dsim
RUN pip install --no-cache-dir /tmp/dsim && rm -r /tmp/dsim
# What the first run would compile is compiled here, and kept where any user of the container may read and add to it.
# (A run of fewer than 500 requests may end in plain Python, and compile nothing.)
ENV NUMBA_CACHE_DIR=/var/cache/dsim
RUN mkdir -m 777 /var/cache/dsim \
    && dsim replay azure-conv --num-requests 500 --policy lmdeploy-bd32 --policy optimus \
    && chmod -R a+rwX /var/cache/dsim
WORKDIR /work
ENTRYPOINT ["dsim"]
CMD ["--help"]
