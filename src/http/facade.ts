import type { Socket } from 'node:net';
import type { FastifyError, FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import type { Instance } from '../../gen/baton/v1/instance_pb.ts';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { BatonError } from '../core/errors.ts';
import { isRoutable } from '../core/pools.ts';
import { acceptedRequestId } from '../core/request-headers.ts';
import { errorFields } from '../obs/log.ts';
import type { InstanceView } from '../services/instance-view.ts';
import type { Admission, TenantLimits } from '../services/tenant-limits.ts';
import { addMetricsRoute } from './admin.ts';
import type { Authenticate } from './authenticate.ts';
import { BrokenRequests } from './broken-request.ts';
import { toRequestError } from './errors.ts';
import { GENERATE_ROUTES, type GenerateDeps, refuseEarly, serveGenerate } from './generate.ts';
import { lingerAfter } from './linger.ts';
import { NO_SCHEMAS } from './no-schemas.ts';
import { type HttpTls, limitConnections, openServer, type ServerLimits } from './server-options.ts';
import { watchBodies } from './stalled-bodies.ts';
import { type ProxyRules, takeProxyHeaders } from './tenant-header.ts';
import { closeUnusedConnections } from './unused-connections.ts';

declare module 'fastify' {
  interface FastifyRequest {
    /** Whom the request belongs to; empty on routes that ask nobody. */
    tenant: string;
    /** What the request uses of its tenant's limits; undefined on routes that use nothing. */
    admission: Admission | undefined;
  }
}

/** What `/health` tells of the store. */
export interface StoreHealth {
  /** Live handles. */
  readonly conversations: number;
  /** Handles that expired since the last look. */
  readonly expired: number;
}

/** What the facade is built from. */
export interface FacadeDeps extends Pick<GenerateDeps, 'metrics' | 'log'> {
  /** What a request that begins now works with, to its end. */
  readonly generate: () => GenerateDeps;
  readonly authenticate: Authenticate;
  readonly proxies: () => ProxyRules;
  readonly tenantLimits: TenantLimits;
  readonly view: InstanceView;
  /** Connector of the instances that requests are routed to. */
  readonly connector: string;
  readonly version: string;
  /** Undefined where the store runs elsewhere. */
  readonly storeHealth: (() => Promise<StoreHealth>) | undefined;
  /** Requests are still served, and none is wanted any more. */
  readonly isStopping: () => boolean;
  /** No request can be planned: the router of another process is away. */
  readonly isRouterAway: () => boolean;
  readonly bodyLimitBytes: number;
  readonly limits: ServerLimits;
  /** Header lines of a request. */
  readonly headerCount: number;
  /** Default: cleartext. */
  readonly tls: HttpTls | undefined;
  /** Serve `/metrics` here too (`--metrics-on-facade`). */
  readonly exposeMetrics: boolean;
}

/** Longer than common load balancers keep theirs, so that it is never this side that closes first. */
const KEEP_ALIVE_MS = 75_000;

/** As Node's own limit for a request has it. */
const STALLED = Object.assign(new Error('the body stopped coming'), { code: 'ERR_HTTP_REQUEST_TIMEOUT' });

/** Builds the OpenAI-compatible front door; it does not listen yet. */
export function buildFacade(deps: FacadeDeps): FastifyInstance {
  const broken = new BrokenRequests();
  const { limits, tls } = deps;
  const app = openServer(limits, tls, {
    schemaController: NO_SCHEMAS,
    bodyLimit: deps.bodyLimitBytes,
    logger: false,
    requestTimeout: 0,
    connectionTimeout: 0,
    keepAliveTimeout: KEEP_ALIVE_MS,
    forceCloseConnections: 'idle',
    return503OnClosing: false,
    routerOptions: { ignoreTrailingSlash: true, maxParamLength: 1024 },
    clientErrorHandler: (error, socket) => broken.answer(error, socket as Socket),
    // A path that cannot be decoded; Fastify's own answer would repeat it.
    frameworkErrors(_error, _request, reply) {
      void refuseEarly(NO_SUCH_PATH, reply);
    },
  });
  broken.watch(app.server);
  limitConnections(app, 'facade', limits, deps.log);
  closeUnusedConnections(app);
  watchBodies(
    app,
    () => deps.generate().clientStallMs,
    ({ socket }) => broken.answer(STALLED, socket),
  );
  app.removeAllContentTypeParsers();
  app.addContentTypeParser('*', { parseAs: 'buffer' }, (_request, body, done) => done(null, body));
  app.addHook('onRequest', async (request, reply) => {
    // Bodies are bytes whatever their type says; Fastify would refuse a type that it cannot read.
    delete request.raw.headers['content-type'];
    if (request.headers.origin !== undefined) reply.header('access-control-allow-origin', '*');
    if (request.raw.rawHeaders.length > 2 * deps.headerCount) throw tooManyHeaders(deps.headerCount);
    // The client's next request goes to another one.
    if (deps.isStopping()) reply.raw.shouldKeepAlive = false;
    const id = acceptedRequestId(request.headers['x-request-id']);
    if (id !== undefined) reply.header('x-request-id', id);
  });
  addAuthentication(app, deps);
  for (const [path, api] of Object.entries(GENERATE_ROUTES)) {
    app.post(path, (request, reply) => serveGenerate(deps.generate(), api, request, reply));
  }
  addInfoRoutes(app, deps);
  if (deps.exposeMetrics) addMetricsRoute(app, deps.metrics);
  addPreflight(app);
  app.setErrorHandler((error: FastifyError, request, reply) => {
    const known = toRequestError(error, deps.bodyLimitBytes);
    if (known.reason === 'INTERNAL') deps.log.error(errorFields(error), 'request failed');
    // The rest of a refused body is thrown away: the connection cannot be used again.
    if (known.reason === 'BODY_TOO_LARGE') {
      reply.header('connection', 'close');
      lingerAfter(request.raw);
    }
    deps.metrics.failed(known.reason);
    return refuseEarly(known, reply);
  });
  app.setNotFoundHandler((request, reply) => {
    const path = request.url.split('?', 1)[0] ?? '';
    const allowed = METHODS[path.replace(/\/$/, '')];
    deps.metrics.failed(allowed === undefined ? 'ROUTE_NOT_FOUND' : 'METHOD_NOT_ALLOWED');
    if (allowed !== undefined) {
      reply.header('allow', allowed);
      return refuseEarly(
        new BatonError({ reason: 'METHOD_NOT_ALLOWED', message: `${path} takes ${allowed}, not ${request.method}.` }),
        reply,
      );
    }
    return refuseEarly(NO_SUCH_PATH, reply);
  });
  return app;
}

function tooManyHeaders(most: number): BatonError {
  return new BatonError({
    reason: 'HEADERS_TOO_LARGE',
    message: `The request has more than ${most} header lines (facade.max_headers).`,
  });
}

/** Routes without a key: what load balancers, probes and scrapers read. Every other one asks for it, as vLLM's do. */
const OPEN_ROUTES: ReadonlySet<string | undefined> = new Set([
  '/health',
  '/liveness',
  '/readiness',
  '/version',
  '/metrics',
]);

/**
 * Says whose a request is, or refuses it, before its body is read. A preflight cannot carry a credential, and 404 and 405
 * tell nothing.
 */
function addAuthentication(app: FastifyInstance, { authenticate, proxies, tenantLimits, metrics }: FacadeDeps): void {
  app.decorateRequest('tenant', '');
  app.decorateRequest('admission', undefined);
  const admit = async (request: FastifyRequest, reply: FastifyReply): Promise<BatonError | undefined> => {
    const named = takeProxyHeaders(proxies(), request.raw);
    if (request.is404 || request.method === 'OPTIONS' || OPEN_ROUTES.has(request.routeOptions.url)) return undefined;
    const result = await authenticate(request.headers);
    if (result.kind === 'refused') return result.error;
    request.tenant = named ?? result.tenant;
    if (!Object.hasOwn(GENERATE_ROUTES, request.routeOptions.url ?? '')) return undefined;
    const admission = tenantLimits.admit(request.tenant);
    if (admission instanceof BatonError) return admission;
    request.admission = admission;
    reply.raw.once('close', () => admission.leave());
    return undefined;
  };
  app.addHook('onRequest', async (request, reply) => {
    const refused = await admit(request, reply);
    if (refused === undefined) return;
    metrics.failed(refused.reason);
    return refuseEarly(refused, reply);
  });
}

const NO_SUCH_PATH = new BatonError({ reason: 'ROUTE_NOT_FOUND', message: 'No such path.' });

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
  app.get('/health', async () => ({
    status: 'ok',
    ...(await readStoreHealth(deps)),
    ready: obstacleTo(deps) === undefined,
    instances: countStates(view.snapshot()),
  }));
  app.get('/liveness', () => ({ status: 'ok' }));
  app.get('/readiness', (_request, reply) => {
    const obstacle = obstacleTo(deps);
    return reply.code(obstacle === undefined ? 200 : 503).send({ status: obstacle ?? 'ok' });
  });
  app.get('/version', () => ({ version: deps.version }));
}

/** Why no request should come here. */
function obstacleTo({ isStopping, isRouterAway, view, connector }: FacadeDeps): string | undefined {
  if (isStopping()) return 'stopping';
  if (isRouterAway()) return 'the router is away';
  return isRoutable(view.snapshot(), connector) ? undefined : 'no routable engines';
}

/** The example proxy's two fields; a facade without the store beside it does not know them. */
async function readStoreHealth({ storeHealth }: FacadeDeps) {
  const { conversations, expired } = (await storeHealth?.()) ?? { conversations: 0, expired: 0 };
  return { cached_conversations: conversations, evicted_stale: expired };
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
