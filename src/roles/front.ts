import { AsyncDisposableStack } from '@whatwg-node/disposablestack';
import type { FastifyInstance } from 'fastify';
import type { TlsConfig } from '../config/config.ts';
import type { Settings } from '../config/settings.ts';
import type { ServerTls } from '../core/server-tls.ts';
import { buildFacade, type FacadeService } from '../http/facade.ts';
import { renewTls } from '../http/server-options.ts';
import type { Logger } from '../obs/log.ts';
import type { Metrics } from '../obs/metrics.ts';
import type { Life } from '../services/life.ts';
import { listen } from './listen.ts';
import type { Watched } from './watched-files.ts';

/** The facade as it listens before the rest of its process runs: what needs that waits. */
export interface Front {
  readonly app: FastifyInstance;
  /** `host:port`, or `off`. */
  readonly address: string;
  readonly life: Life<FacadeService>;
  /** Closes it, and refuses who waits. */
  readonly stack: AsyncDisposableStack;
}

/** Builds the facade and opens its listener. */
export async function openFront(
  parts: {
    readonly settings: Settings;
    readonly metrics: Metrics;
    readonly log: Logger;
    readonly version: string;
    readonly life: Life<FacadeService>;
  },
  outer: AsyncDisposableStack,
): Promise<Front> {
  const { settings, metrics, log, version, life } = parts;
  const { facade } = settings.current;
  const stack = outer.use(new AsyncDisposableStack());
  const tls =
    facade.tls === undefined
      ? undefined
      : stack.use(await watchTls(facade.tls, { metrics, log }, (next) => renewTls(app, next)));
  const app = buildFacade({
    life,
    metrics,
    log,
    version,
    clientStallMs: () => settings.current.timeouts.clientStallMs,
    bodyLimitBytes: facade.bodyLimitBytes,
    exposeMetrics: facade.metrics,
    limits: { headerBytes: facade.headerBytes, headerMs: facade.headerMs, connections: facade.maxConnections },
    headerCount: facade.headerCount,
    tls: tls?.current,
  });
  stack.defer(() => {
    life.fail();
    return app.close();
  });
  return { app, address: await listen(app, facade.host, facade.port, '--port', log), life, stack };
}

/** What reads certificates is loaded only where there are some. */
async function watchTls(
  tls: TlsConfig,
  told: { readonly metrics: Metrics; readonly log: Logger },
  use: (tls: ServerTls) => void,
): Promise<Watched<ServerTls>> {
  const { watchServerTls } = await import('./server-tls.ts');
  return watchServerTls('facade', tls, told, use);
}
