import type { Socket } from 'node:net';
import type { FastifyError, FastifyInstance, FastifyReply, FastifyRequest } from 'fastify';
import { BatonError } from '../core/errors.ts';
import type { Api } from '../core/facts.ts';
import { acceptedRequestId } from '../core/request-headers.ts';
import type { ServerTls } from '../core/server-tls.ts';
import { errorFields, type Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Life } from '../services/life.ts';
import type { Admission, TenantLimits } from '../services/tenant-limits.ts';
import type { Authenticate } from './authenticate.ts';
import { BrokenRequests } from './broken-request.ts';
import { type EarlyEnd, type EarlyRecords, recordBroken, recordEarly } from './early-record.ts';
import { refuseEarly, toRequestError } from './errors.ts';
import { lingerAfter } from './linger.ts';
import { addMetricsRoute } from './metrics-route.ts';
import { NO_SCHEMAS } from './no-schemas.ts';
import { limitConnections, openServer, type ServerLimits } from './server-options.ts';
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

/** Path of each API, the same on the facade and on engines. */
const GENERATE_ROUTES: Readonly<Record<string, Api>> = {
  '/v1/chat/completions': 'chat.completions',
  '/v1/completions': 'completions',
};

/** What requests need; it is there when everything of the process runs. */
export interface FacadeService {
  readonly authenticate: Authenticate;
  readonly proxies: () => ProxyRules;
  readonly tenantLimits: TenantLimits;
  /** Serves one generating request to its end; never throws. */
  readonly serve: (api: Api, request: FastifyRequest, reply: FastifyReply) => Promise<void>;
  /** Models of all instances, each as its engine wrote it. */
  readonly modelCards: () => readonly string[];
  readonly health: () => Promise<FacadeHealth>;
  /** Why no request should come here; undefined where it may. */
  readonly obstacle: () => string | undefined;
}

/** What `/health` tells of a process that runs. */
interface FacadeHealth {
  /** Live handles. */
  readonly conversations: number;
  /** Handles that expired since the last look. */
  readonly expired: number;
  /** How many there are of each state. */
  readonly instances: Readonly<Record<string, number>>;
}

/**
 * What the facade is built from. It listens while the rest of the process is loaded, so nothing here may need much of that:
 * what does belongs to {@link FacadeService}.
 */
export interface FacadeDeps {
  readonly life: Life<FacadeService>;
  readonly metrics: Metrics;
  readonly log: Logger;
  readonly version: string;
  readonly clientStallMs: () => number;
  readonly bodyLimitBytes: number;
  readonly limits: ServerLimits;
  /** Header lines of a request. */
  readonly headerCount: number;
  /** Default: cleartext. */
  readonly tls: ServerTls | undefined;
  /** Serve `/metrics` here too (`--metrics-on-facade`). */
  readonly exposeMetrics: boolean;
}

/** Longer than common load balancers keep theirs, so that it is never this side that closes first. */
const KEEP_ALIVE_MS = 75_000;

/** As Node's own limit for a request has it. */
const STALLED = Object.assign(new Error('the body stopped coming'), { code: 'ERR_HTTP_REQUEST_TIMEOUT' });

/** Builds the OpenAI-compatible front door; it does not listen yet. */
export function buildFacade(deps: FacadeDeps): FastifyInstance {
  const broken = new BrokenRequests((seen) => recordBroken(deps, seen));
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
  addPatience(app, deps);
  watchBodies(app, deps.clientStallMs, ({ socket }) => broken.answer(STALLED, socket));
  app.removeAllContentTypeParsers();
  app.addContentTypeParser('*', { parseAs: 'buffer' }, (_request, body, done) => done(null, body));
  app.addHook('onRequest', async (request, reply) => {
    // Bodies are bytes whatever their type says; Fastify would refuse a type that it cannot read.
    delete request.raw.headers['content-type'];
    if (request.headers.origin !== undefined) reply.header('access-control-allow-origin', '*');
    if (request.raw.rawHeaders.length > 2 * deps.headerCount) throw tooManyHeaders(deps.headerCount);
    // The client's next request goes to another one.
    if (deps.life.isStopping) reply.raw.shouldKeepAlive = false;
    const id = acceptedRequestId(request.headers['x-request-id']);
    if (id !== undefined) reply.header('x-request-id', id);
  });
  addAuthentication(app, deps);
  for (const [path, api] of Object.entries(GENERATE_ROUTES)) {
    app.post(path, async (request, reply) => (await deps.life.running).serve(api, request, reply));
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
    return refuseRecorded(deps, request, reply, { error: known, sent: broken.answerTo(request.raw) });
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

/** Refuses a request that has not come to its route. */
function refuseRecorded(deps: EarlyRecords, request: FastifyRequest, reply: FastifyReply, end: EarlyEnd): FastifyReply {
  const api = GENERATE_ROUTES[request.routeOptions.url ?? ''];
  if (api === undefined) deps.metrics.failed(end.error.reason);
  else recordEarly(deps, api, request, reply, end);
  return refuseEarly(end.error, reply);
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

/** A preflight cannot carry a credential, and 404 and 405 tell nothing. */
function isOpen({ is404, method, routeOptions }: FastifyRequest): boolean {
  return is404 || method === 'OPTIONS' || OPEN_ROUTES.has(routeOptions.url);
}

/** Lets requests wait until everything runs that they need; before their bodies are watched, which are not read meanwhile. */
function addPatience(app: FastifyInstance, { life }: FacadeDeps): void {
  app.addHook('onRequest', (request, _reply, done) => {
    if (life.current !== undefined || isOpen(request)) done();
    else life.running.then(() => done(), done);
  });
}

/** Says whose a request is, or refuses it, before its body is read. */
function addAuthentication(app: FastifyInstance, deps: FacadeDeps): void {
  const { life } = deps;
  app.decorateRequest('tenant', '');
  app.decorateRequest('admission', undefined);
  const admit = async (request: FastifyRequest, reply: FastifyReply): Promise<BatonError | undefined> => {
    const service = life.current ?? (isOpen(request) ? undefined : await life.running);
    if (service === undefined) return undefined;
    const named = takeProxyHeaders(service.proxies(), request.raw);
    if (isOpen(request)) return undefined;
    const result = await service.authenticate(request.headers);
    if (result.kind === 'refused') return result.error;
    request.tenant = named ?? result.tenant;
    // Whoever has gone meanwhile would never give back what it takes.
    if (reply.raw.destroyed) return undefined;
    if (!Object.hasOwn(GENERATE_ROUTES, request.routeOptions.url ?? '')) return undefined;
    const admission = service.tenantLimits.admit(request.tenant);
    if (admission instanceof BatonError) return admission;
    request.admission = admission;
    reply.raw.once('close', () => admission.leave());
    return undefined;
  };
  app.addHook('onRequest', async (request, reply) => {
    const refused = await admit(request, reply);
    if (reply.raw.destroyed) return void reply.hijack();
    if (refused === undefined) return;
    return refuseRecorded(deps, request, reply, { error: refused });
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

function addInfoRoutes(app: FastifyInstance, { life, version }: FacadeDeps): void {
  app.get('/v1/models', async (_request, reply) => {
    const { modelCards } = await life.running;
    return reply.type('application/json').send(`{"object":"list","data":[${modelCards().join(',')}]}`);
  });
  app.get('/health', async () => {
    const { conversations, expired, instances } = (await life.current?.health()) ?? NOTHING_YET;
    return {
      status: 'ok',
      cached_conversations: conversations,
      evicted_stale: expired,
      ready: obstacleTo(life) === undefined,
      instances,
    };
  });
  app.get('/liveness', () => ({ status: 'ok' }));
  app.get('/readiness', (_request, reply) => {
    const obstacle = obstacleTo(life);
    return reply.code(obstacle === undefined ? 200 : 503).send({ status: obstacle ?? 'ok' });
  });
  app.get('/version', () => ({ version }));
}

const NOTHING_YET: FacadeHealth = { conversations: 0, expired: 0, instances: {} };

/** Why no request should come here. */
function obstacleTo({ isStopping, current }: Life<FacadeService>): string | undefined {
  if (isStopping) return 'stopping';
  return current === undefined ? 'starting' : current.obstacle();
}
