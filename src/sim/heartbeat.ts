import type { SimClock } from './clock.ts';
import { isTruthy, type JsonObject } from './json.ts';
import { readTarget } from './kv-params.ts';
import type { SideChannelClient } from './side-channel.ts';

/** A queued decode request keeps the producer's lease alive; returns what ends that. */
export function startHeartbeat(
  kv: JsonObject | undefined,
  peers: SideChannelClient,
  clock: SimClock,
  everyMs: number,
): () => void {
  const target = kv !== undefined && isTruthy(kv['do_remote_prefill']) ? readTarget(kv) : undefined;
  if (target === undefined || !isTruthy(kv?.['tp_size'])) return () => {};
  let timer: unknown;
  const send = (): void => {
    const beat = { op: 'beat', engineId: target.engineId, requestIds: [target.requestId] } as const;
    void peers.ask(target.host, target.port, beat);
    timer = clock.setTimeout(send, everyMs);
  };
  send();
  return () => clock.clearTimeout(timer);
}
