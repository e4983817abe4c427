import type { Config, InstanceConfig } from '../config/config.ts';
import type { Settings } from '../config/settings.ts';
import type { Connector, FirstTokenConnector } from '../connectors/connector.ts';
import { CONNECTORS } from '../connectors/index.ts';
import type { Receiver } from '../core/receiver.ts';
import type { EngineClient } from '../engine/client.ts';
import type { Notices } from '../engine/notices.ts';
import type { Metrics } from '../obs/metrics.ts';
import { BufferAdmission } from '../services/buffer-admission.ts';
import { Drains } from '../services/drains.ts';
import type { FirstTokenDeps } from '../services/first-token-deps.ts';
import type { EngineHeadersOf } from './credentials.ts';
import { failStart } from './listen.ts';

/** How long after a prefill its KV is still waited for, in order to take it out of the decode engine's buffer. */
const LATE_MS = 60_000;

/** The connector of this process if it is one that hands over the first token. */
export function firstTokenConnector(config: Config): FirstTokenConnector | undefined {
  const connectors: Readonly<Record<string, Connector>> = CONNECTORS;
  const connector = connectors[config.kvConnector];
  return connector?.runner === 'first-token' ? connector : undefined;
}

/** Opens the notice socket, or joins that of another process; ZMQ is loaded here and nowhere else. */
export async function openNotices(config: Config, metrics: Metrics, stack: AsyncDisposableStack): Promise<Notices> {
  const { Notices, openPublisher } = await import('../engine/notices.ts');
  const { proxyHost: host, proxyPort: port, noticePublish, noticeHub } = config.lmcache;
  const observe = (result: string) => metrics.noticed(result);
  if (noticeHub !== undefined) return stack.use(Notices.join(noticeHub, observe));
  const publisher =
    noticePublish === undefined
      ? undefined
      : await openPublisher(noticePublish).catch((error: unknown) =>
          failStart(error, noticePublish.host, noticePublish.port, 'lmcache.notice_publish'),
        );
  return stack.use(
    await Notices.open({ host, port, publisher, observe }).catch((error: unknown) => {
      publisher?.close();
      return failStart(error, host, port, '--proxy-port');
    }),
  );
}

/** What the facade needs for such a connector. */
export function buildFirstToken(parts: {
  readonly settings: Settings;
  readonly connector: FirstTokenConnector;
  /** Simulated engines, which bring their ports along. */
  readonly sims: readonly InstanceConfig[];
  readonly notices: Notices;
  readonly engines: EngineClient;
  readonly engineHeaders: EngineHeadersOf;
  readonly metrics: Metrics;
  readonly stack: AsyncDisposableStack;
}): FirstTokenDeps {
  const { settings, connector, sims, notices, engines, engineHeaders, metrics, stack } = parts;
  const { lmcache } = settings.current;
  const simulated = simReceivers(sims);
  const receiverOf = (id: string) => simulated.get(id) ?? settings.current.lmcache.receivers[id];
  const noticesOf = (id: string) => settings.current.lmcache.notices[id] ?? lmcache.defaultNotices;
  const slotBytes = lmcache.kvBytesPerToken * lmcache.chunkTokens;
  const drains = stack.use(
    new Drains({
      engines,
      engineHeaders,
      roomMs: lmcache.noticeTimeoutMs || LATE_MS,
      lateMs: Math.max(LATE_MS, lmcache.noticeTimeoutMs),
      observe: (result) => metrics.drained(result),
    }),
  );
  return {
    connector,
    notices,
    receiverOf,
    noticesOf,
    admission: new BufferAdmission({
      chunkTokens: lmcache.chunkTokens,
      // Each rank has a buffer and its share of the KV; where one rank alone stores (MLA), it has all of it.
      slotsOf: (id) => {
        if (slotBytes === 0) return Number.POSITIVE_INFINITY;
        const ranks = receiverOf(id)?.initPorts.length ?? 1;
        return Math.floor(
          (lmcache.bufferBytes * Math.max(1, Math.min(ranks, lmcache.defaultNotices ?? ranks))) / slotBytes,
        );
      },
    }),
    drains,
    noticeMs: lmcache.noticeTimeoutMs,
    uncarried: lmcache.uncarried,
  };
}

function simReceivers(sims: readonly InstanceConfig[]): ReadonlyMap<string, Receiver> {
  const receivers = sims.flatMap(({ id, url, lmcache }) =>
    lmcache?.initPorts === undefined || lmcache.allocPorts === undefined
      ? []
      : [
          [
            id,
            {
              host: new URL(url).hostname,
              initPorts: lmcache.initPorts,
              allocPorts: lmcache.allocPorts,
              queryPorts: [],
            },
          ] as const,
        ],
  );
  return new Map(receivers);
}
