import { randomUUID } from 'node:crypto';
import type { EngineClient } from '../engine/client.ts';
import type { EngineHeaders } from './hand-over.ts';
import { runWholeLeg } from './leg.ts';

/** What every leg of baton's own goes out with. */
export interface OneTokenDeps {
  readonly engines: EngineClient;
  readonly engineHeaders: (instanceId: string, authorization: string | undefined) => EngineHeaders;
}

/** A completion of one token that baton asks for by itself, for what the engine does with KV on the way. */
export interface OneTokenLeg {
  readonly instanceId: string;
  readonly url: string;
  /** The client's, where the leg belongs to one. */
  readonly authorization: string | undefined;
  /** Begins the request id, which engines log. */
  readonly name: string;
  readonly body: Uint8Array;
  readonly timeoutMs: number;
  readonly signal: AbortSignal;
}

/** True when the engine answered with 200. */
export async function runOneTokenLeg({ engines, engineHeaders }: OneTokenDeps, leg: OneTokenLeg): Promise<boolean> {
  const { instanceId, url, authorization, name, body, timeoutMs, signal } = leg;
  const headers = {
    ...engineHeaders(instanceId, authorization).headers,
    'content-type': 'application/json',
    'accept-encoding': 'identity',
    'x-request-id': `${name}-${randomUUID()}`,
  };
  const request = { url, method: 'POST', path: COMPLETIONS_PATH, headers, body } as const;
  const result = await runWholeLeg(engines, request, { timeoutMs, signal, now: () => 0 });
  return result.kind === 'reply' && result.status === 200;
}

const COMPLETIONS_PATH = '/v1/completions';
