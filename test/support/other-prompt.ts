import { createServer } from 'node:http';
import type { AddressInfo } from 'node:net';
import { expect } from 'vitest';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { metricOf } from '../e2e/ladder-support.ts';
import type { Harness } from './harness.ts';
import { instanceAt } from './instances.ts';

interface Message {
  readonly role: string;
  readonly content: unknown;
}

/** A chat request on its way to an engine. */
export interface AskedChat {
  readonly messages: readonly Message[];
  /** The token ids of the prompt are in it. */
  readonly isGiven: boolean;
}

/**
 * A front of an engine that renders other messages wherever `change` gives some, and then drops the token ids it is given;
 * streams come in one piece.
 */
export async function startOtherPrompt(
  target: string,
  change: (asked: AskedChat) => readonly Message[] | undefined,
): Promise<AsyncDisposable & { readonly url: string }> {
  const server = createServer((request, response) => {
    void (async () => {
      const chunks: Buffer[] = [];
      for await (const chunk of request) chunks.push(chunk as Buffer);
      let body: Buffer | string = Buffer.concat(chunks);
      if (request.method === 'POST' && request.url === '/v1/chat/completions') {
        const parsed = JSON.parse(body.toString()) as {
          messages: Message[];
          kv_transfer_params?: { prompt_token_ids?: unknown };
        };
        const isGiven = parsed.kv_transfer_params?.prompt_token_ids !== undefined;
        const messages = change({ messages: parsed.messages, isGiven });
        if (messages !== undefined) {
          delete parsed.kv_transfer_params?.prompt_token_ids;
          body = JSON.stringify({ ...parsed, messages });
        }
      }
      const reply = await fetch(target + (request.url ?? ''), {
        method: request.method ?? 'GET',
        headers: { 'content-type': 'application/json' },
        ...(request.method === 'POST' ? { body } : {}),
      });
      response.writeHead(reply.status, { 'content-type': reply.headers.get('content-type') ?? 'text/plain' });
      response.end(Buffer.from(await reply.arrayBuffer()));
    })();
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  return {
    url: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    async [Symbol.asyncDispose]() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}

/** That the engine at `url`, and no other, was drained for what it used. */
export async function expectBreach(harness: Harness, url: string): Promise<void> {
  await expect
    .poll(() => instanceAt(harness, url))
    .toMatchObject({ state: InstanceState.DRAINING, stateReason: 'guard_breach' });
  expect(await metricOf(harness, 'baton_reuse_alarms_total{what="guard_breach"}')).toBe(1);
}
