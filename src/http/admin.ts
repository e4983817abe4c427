import Fastify, { type FastifyInstance } from 'fastify';
import type { Metrics } from '../obs/metrics.ts';
import { addReloadRoute, type ReloadOptions } from './reload.ts';
import { closeUnusedConnections } from './unused-connections.ts';
import { addWorkersRoutes, type WorkersOptions } from './workers.ts';

/** Adds `GET /metrics` in the Prometheus text format. */
export function addMetricsRoute(app: FastifyInstance, metrics: Metrics): void {
  app.get('/metrics', async (_request, reply) => reply.type(metrics.contentType).send(await metrics.render()));
}

/** Builds the operators' listener; it does not listen yet. Without `workers` it knows no pools. */
export function buildAdmin(
  metrics: Metrics,
  reload: ReloadOptions,
  workers: WorkersOptions | undefined,
): FastifyInstance {
  const app = Fastify({ logger: false, forceCloseConnections: 'idle' });
  closeUnusedConnections(app);
  addMetricsRoute(app, metrics);
  addReloadRoute(app, reload);
  if (workers !== undefined) addWorkersRoutes(app, workers);
  app.get('/liveness', () => ({ status: 'ok' }));
  return app;
}
