import Fastify, { type FastifyError, type FastifyInstance } from 'fastify';
import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { BatonError } from '../core/errors.ts';
import { isRoutable } from '../core/plan.ts';
import { acceptedRequestId } from '../core/request-headers.ts';
import { errorFields } from '../obs/log.ts';
import type { InstanceView } from '../services/instance-view.ts';
import { toRequestError } from './errors.ts';
import { GENERATE_ROUTES, type GenerateDeps, refuseEarly, serveGenerate } from './generate.ts';
import { addMetricsRoute } from './admin.ts';

/** What the facade is built from. */
export interface FacadeDeps extends GenerateDeps {
  readonly view: InstanceView;
  readonly version: string;
  readonly bodyLimitBytes: number;
  /** Serve `/metrics` here too (`--metrics-on-facade`). */
  readonly exposeMetrics: boolean;
}

/** Node's own limit for the head of a request; the body may take as long as it needs. */
const HEADERS_TIMEOUT_MS = 60_000;
/** Longer than common load balancers keep theirs, so that it is never this side that closes first. */
const KEEP_ALIVE_MS = 75_000;

/** Builds the OpenAI-compatible front door; it does not listen yet. */
export function buildFacade(deps: FacadeDeps): FastifyInstance {
  const app = Fastify({
    bodyLimit: deps.bodyLimitBytes,
    logger: false,
    requestTimeout: 0,
    connectionTimeout: 0,
    keepAliveTimeout: KEEP_ALIVE_MS,
    forceCloseConnections: 'idle',
    return503OnClosing: false,
    routerOptions: { ignoreTrailingSlash: true, maxParamLength: 1024 },
    clientErrorHandler(error, socket) {
      // The head was no HTTP: nothing is known of the request but that it is bad.
      const { code } = error as NodeJS.ErrnoException;
      if (code === 'ECONNRESET' || !socket.writable) {
        socket.destroy();
        return;
      }
      const status = code === 'HPE_HEADER_OVERFLOW' ? '431 Request Header Fields Too Large' : '400 Bad Request';
      socket.end(`HTTP/1.1 ${status}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n`);
    },
  });
  app.server.headersTimeout = HEADERS_TIMEOUT_MS;
  app.removeAllContentTypeParsers();
  app.addContentTypeParser('*', { parseAs: 'buffer' }, (_request, body, done) => done(null, body));
  app.addHook('onRequest', async (request, reply) => {
    if (request.headers.origin !== undefined) reply.header('access-control-allow-origin', '*');
    const id = acceptedRequestId(request.headers['x-request-id']);
    if (id !== undefined) reply.header('x-request-id', id);
  });
  for (const [path, api] of Object.entries(GENERATE_ROUTES)) {
    app.post(path, (request, reply) => serveGenerate(deps, api, request, reply));
  }
  addInfoRoutes(app, deps);
  if (deps.exposeMetrics) addMetricsRoute(app, deps.metrics);
  addPreflight(app);
  app.setErrorHandler((error: FastifyError, _request, reply) => {
    const known = toRequestError(error, deps.bodyLimitBytes);
    if (known.reason === 'INTERNAL') deps.log.error(errorFields(error), 'request failed');
    // The rest of a refused body is not read: the connection cannot be used again.
    if (known.reason === 'BODY_TOO_LARGE') reply.header('connection', 'close');
    return refuseEarly(known, reply);
  });
  app.setNotFoundHandler((request, reply) => {
    const path = request.url.split('?', 1)[0] ?? '';
    const allowed = METHODS[path.replace(/\/$/, '')];
    if (allowed !== undefined) {
      reply.header('allow', allowed);
      return refuseEarly(
        new BatonError({ reason: 'METHOD_NOT_ALLOWED', message: `${path} takes ${allowed}, not ${request.method}.` }),
        reply,
      );
    }
    return refuseEarly(new BatonError({ reason: 'ROUTE_NOT_FOUND', message: 'No such path.' }), reply);
  });
  return app;
}

/** Methods of the known paths, for 405. */
const METHODS: Readonly<Record<string, string>> = {
  ...Object.fromEntries(Object.keys(GENERATE_ROUTES).map((path) => [path, 'POST'])),
  ...Object.fromEntries(
    ['/v1/models', '/health', '/liveness', '/readiness', '/version'].map((path) => [path, 'GET, HEAD']),
  ),
};

function addPreflight(app: FastifyInstance): void {
  app.options('/*', (request, reply) => {
    const wanted = request.headers['access-control-request-headers'];
    return reply
      .code(204)
      .header('access-control-allow-origin', '*')
      .header('access-control-allow-methods', 'GET, POST, OPTIONS')
      .header('access-control-allow-headers', typeof wanted === 'string' ? wanted : '*')
      .header('access-control-max-age', '600')
      .send();
  });
}

function addInfoRoutes(app: FastifyInstance, deps: FacadeDeps): void {
  const { view } = deps;
  app.get('/v1/models', (_request, reply) =>
    reply.type('application/json').send(`{"object":"list","data":[${modelCards(view.snapshot()).join(',')}]}`),
  );
  app.get('/health', () => ({
    status: 'ok',
    // The example proxy's fields; decode-to-prefill reuse fills them.
    cached_conversations: 0,
    evicted_stale: 0,
    ready: isRoutable(view.snapshot()),
    instances: countStates(view.snapshot()),
  }));
  app.get('/liveness', () => ({ status: 'ok' }));
  app.get('/readiness', (_request, reply) => {
    const ready = isRoutable(view.snapshot());
    return reply.code(ready ? 200 : 503).send({ status: ready ? 'ok' : 'no routable engines' });
  });
  app.get('/version', () => ({ version: deps.version }));
}

/** The union of the pools' model cards as the engines wrote them, each id once. */
function modelCards(instances: readonly Instance[]): string[] {
  const byId = new Map<string, string>();
  for (const { models, state } of instances) {
    if (state === InstanceState.GONE) continue;
    for (const card of models) if (!byId.has(card.id)) byId.set(card.id, card.rawJson);
  }
  return [...byId.values()];
}

const STATE_NAMES: Readonly<Record<number, string>> = {
  [InstanceState.STARTING]: 'starting',
  [InstanceState.READY]: 'ready',
  [InstanceState.SUSPECT]: 'suspect',
  [InstanceState.DRAINING]: 'draining',
  [InstanceState.GONE]: 'gone',
};

function countStates(instances: readonly Instance[]): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const { state } of instances) {
    const name = STATE_NAMES[state] ?? 'unknown';
    counts[name] = (counts[name] ?? 0) + 1;
  }
  return counts;
}
