import { connect } from 'node:net';
import { setTimeout } from 'node:timers/promises';
import { expect, test } from 'vitest';
import { sayJson, startStubbed } from '../support/stub-engine.ts';

const HEAD = 'POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n';

/** Sends pieces with a pause before each, and reads to the end. */
async function send(port: number, pieces: readonly string[], pauseMs: number): Promise<string> {
  const socket = connect(port, '127.0.0.1');
  let text = '';
  socket.setEncoding('latin1').on('data', (data: string) => (text += data));
  const closed = new Promise<void>((resolve) => socket.on('close', () => resolve()));
  socket.on('error', () => undefined);
  for (const piece of pieces) {
    socket.write(piece);
    await setTimeout(pauseMs);
  }
  await closed;
  return text;
}

test('half a body does not hold a connection for ever; one that comes slowly is waited for', async () => {
  await using stubbed = await startStubbed({ yaml: 'timeouts: { client_stall: 400ms }' });
  stubbed.d.answer = sayJson('{"choices":[]}');
  const stalled = await send(stubbed.port, [`${HEAD}content-length: 20\r\n\r\n{"a"`], 0);
  expect(stalled).toMatch(/^HTTP\/1\.1 408 /);
  expect(JSON.parse(stalled.split('\r\n\r\n')[1] ?? '')).toMatchObject({ error: { type: 'invalid_request_error' } });
  const chunked = await send(stubbed.port, [`${HEAD}transfer-encoding: chunked\r\n\r\n5\r\n{"a":`], 0);
  expect(chunked).toMatch(/^HTTP\/1\.1 408 /);
  expect(stubbed.p.requests).toEqual([]);
  // Longer in all than a stall may be.
  const pieces = [...`{"seed":1234567890}`];
  const slow = await send(stubbed.port, [`${HEAD}content-length: ${pieces.length}\r\n\r\n`, ...pieces], 60);
  expect(slow).toMatch(/^HTTP\/1\.1 200 /);
});
