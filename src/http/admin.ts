import type { Socket } from 'node:net';
import type { FastifyError, FastifyInstance } from 'fastify';
import { BatonError } from '../core/errors.ts';
import type { ServerTls } from '../core/server-tls.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import { BrokenRequests } from './broken-request.ts';
import { refuseEarly, toRequestError } from './errors.ts';
import { addMetricsRoute } from './metrics-route.ts';
import { NO_SCHEMAS } from './no-schemas.ts';
import { admit, type OperatorGate } from './operator-gate.ts';
import { addReloadRoute, type ReloadOptions } from './reload.ts';
import { limitConnections, openServer, type ServerLimits } from './server-options.ts';
import { closeUnusedConnections } from './unused-connections.ts';
import { addWorkersRoutes, type WorkersOptions } from './workers.ts';

/** For the head and the body of a request together; what is sent here is small. */
const REQUEST_TIMEOUT_MS = 30_000;
/** Fastify's own. */
const BODY_LIMIT = 1_048_576;

const NO_SUCH_PATH = new BatonError({ reason: 'ROUTE_NOT_FOUND', message: 'No such path.' });

/** How the operators' listener is reached. */
export interface AdminOptions {
  readonly limits: ServerLimits;
  /** Default: cleartext. */
  readonly tls?: ServerTls | undefined;
  /** Who may ask for anything but whether the process lives. Default: everybody may read what tells no workers. */
  readonly guard?: OperatorGate | undefined;
  readonly log: Logger;
}

function addGuard(app: FastifyInstance, guard: OperatorGate): void {
  app.addHook('onRequest', async (request) => {
    if (request.routeOptions.url !== '/liveness') admit(guard, request);
  });
}

/** Builds the operators' listener; it does not listen yet. Without `workers` it knows no pools. */
export function buildAdmin(
  metrics: Metrics,
  reload: ReloadOptions,
  workers: WorkersOptions | undefined,
  { limits, tls, guard, log }: AdminOptions,
): FastifyInstance {
  const broken = new BrokenRequests();
  const app = openServer(limits, tls, {
    schemaController: NO_SCHEMAS,
    logger: false,
    forceCloseConnections: 'idle',
    requestTimeout: REQUEST_TIMEOUT_MS,
    clientErrorHandler: (error, socket) => broken.answer(error, socket as Socket),
    frameworkErrors: (_error, _request, reply) => void refuseEarly(NO_SUCH_PATH, reply),
  });
  broken.watch(app.server);
  limitConnections(app, 'admin', limits, log);
  closeUnusedConnections(app);
  app.removeAllContentTypeParsers();
  app.addContentTypeParser('*', { parseAs: 'string' }, (_request, body, done) => done(null, body));
  // One form for whatever is refused here.
  app.setNotFoundHandler((_request, reply) => refuseEarly(NO_SUCH_PATH, reply));
  app.setErrorHandler((error: FastifyError, _request, reply) => refuseEarly(toRequestError(error, BODY_LIMIT), reply));
  if (guard !== undefined) addGuard(app, guard);
  addMetricsRoute(app, metrics);
  addReloadRoute(app, reload);
  if (workers !== undefined) addWorkersRoutes(app, workers);
  app.get('/liveness', () => ({ status: 'ok' }));
  return app;
}
