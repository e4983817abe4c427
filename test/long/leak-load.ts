// Engines with as little work as there can be, and the clients of a soak: a process of its own, so that the one with baton in
// it holds nothing else. Talks with its parent by messages.
import { createServer, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { PlainClient } from '../support/plain-client.ts';
import { seeded } from '../support/seeded.ts';
import type { LoadCounts, LoadOrder } from './leak-run.ts';

const HANDLE = {
  do_remote_prefill: true,
  do_remote_decode: false,
  remote_block_ids: [[1, 2, 3]],
  remote_engine_id: 'engine',
  remote_request_id: 'request',
  remote_host: '10.0.0.1',
  remote_port: 5600,
  tp_size: 1,
};
const PREFILLED = JSON.stringify({ choices: [{ index: 0, text: 'x' }], kv_transfer_params: HANDLE });
const pieceOf = (text: string, finish: string | null) =>
  `data: ${JSON.stringify({ choices: [{ index: 0, text, finish_reason: finish }] })}\n\n`;

/** Reads a request whole, then answers. */
function listen(answer: (response: ServerResponse) => void): Promise<Server> {
  const server = createServer((request, response) => {
    if (request.method === 'GET') {
      const page = request.url === '/v1/models' ? '{"object":"list","data":[{"id":"m"}]}' : '';
      response.writeHead(request.url === '/health' || page !== '' ? 200 : 404).end(page);
      return;
    }
    request.on('end', () => answer(response)).resume();
  });
  return new Promise((resolve) => server.listen(0, '127.0.0.1', () => resolve(server)));
}

const prefill = await listen((response) => {
  response.writeHead(200, { 'content-type': 'application/json' }).end(PREFILLED);
});
const decode = await listen((response) => {
  response.writeHead(200, { 'content-type': 'text/event-stream' });
  response.write(pieceOf('a', null));
  setImmediate(() => {
    response.write(pieceOf('b', 'stop'));
    response.end('data: [DONE]\n\n');
  });
});

const client = new PlainClient();
const random = seeded(1);
const BODY = JSON.stringify({ model: 'm', prompt: 'x'.repeat(64), stream: true, max_tokens: 2 });

/** No engine for now, or one that did not answer in time. */
const REFUSALS: ReadonlySet<number> = new Set([503, 504]);

async function run({ url, requests, clients }: LoadOrder): Promise<LoadCounts> {
  const counts = { whole: 0, left: 0, refused: 0, other: 0 };
  let begun = 0;
  const one = async () => {
    while (begun < requests) {
      begun += 1;
      const chance = random();
      const leaves = chance < 0.05 ? 'sent' : chance < 0.1 ? 'piece' : undefined;
      const { status, text } = await client.post(`${url}/v1/completions`, BODY, leaves === undefined ? {} : { leaves });
      if (leaves !== undefined) counts.left += 1;
      else if (status === 200 && text.endsWith('data: [DONE]\n\n')) counts.whole += 1;
      else if (REFUSALS.has(status) && text.startsWith('{"error":{')) counts.refused += 1;
      else counts.other += 1;
    }
  };
  await Promise.all(Array.from({ length: clients }, one));
  return counts;
}

const urlOf = (server: Server) => `http://127.0.0.1:${(server.address() as AddressInfo).port}`;

process.on('message', (order: LoadOrder) => {
  void run(order).then((counts) => process.send?.(counts));
});
process.on('disconnect', () => process.exit());
process.send?.({ prefill: urlOf(prefill), decode: urlOf(decode) });
