# syntax=docker/dockerfile:1
# The image of baton: the executable on a base without a shell, see docs/install.md.
ARG BUILD_IMAGE=node:26-bookworm
# Of the same Debian as the image above: the executable has the C library of that.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12:nonroot

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
# The packages first: they change less often than the sources.
COPY package.json package-lock.json .npmrc ./
COPY scripts/setup.mjs scripts/
RUN node scripts/setup.mjs
COPY . .
# What `baton --version` says; the context has no .git.
ARG COMMIT=unknown
RUN node -p "JSON.stringify({ version: require('./package.json').version, commit: process.env.COMMIT })" > origin.json \
  && npm run build:executable \
  && mkdir -p /image/usr/bin /image/usr/lib /image/usr/share/doc/baton \
  && cp dist/baton /image/usr/bin/ \
  && cp dist/THIRD_PARTY_LICENSES LICENSE /image/usr/share/doc/baton/ \
  # Node needs it, and the base has the other libraries of GCC alone.
  && cp -L /usr/lib/*-linux-gnu/libatomic.so.1 /image/usr/lib/

FROM ${BASE_IMAGE}
COPY --from=build /image/ /
# A number, so that Kubernetes sees that it is not root.
USER 65532:65532
# Front door, RPC, admin: the latter two listen on 127.0.0.1 unless told otherwise.
EXPOSE 8000 50051 29000
# SIGTERM drains; replies may take docker stop --time 190.
STOPSIGNAL SIGTERM
# No HEALTHCHECK: whoever runs it asks GET /liveness and /readiness, as deploy/kubernetes does.
ENTRYPOINT ["/usr/bin/baton"]
CMD ["serve"]
