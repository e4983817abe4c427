import type { FastifyInstance } from 'fastify';
import type { Metrics } from '../obs/metrics.ts';

/** Adds `GET /metrics` in the Prometheus text format. */
export function addMetricsRoute(app: FastifyInstance, metrics: Metrics): void {
  app.get('/metrics', async (_request, reply) => reply.type(metrics.contentType).send(await metrics.render()));
}
