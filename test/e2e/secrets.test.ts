import { createHash } from 'node:crypto';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, test } from 'vitest';
import { parseCommand } from '../../src/cli/parse-command.ts';
import { runPool } from '../../src/cli/pool-command.ts';
import { runCli } from '../../src/cli/run.ts';
import { loadConfig } from '../../src/config/load-config.ts';
import { KNOWN } from '../../src/known.ts';
import { formatPretty } from '../../src/obs/log-pretty.ts';
import { connectRemote } from '../../src/rpc/clients.ts';
import { cliHost } from '../support/cli-host.ts';
import { type OtlpReceiver, startOtlpReceiver } from '../support/otlp-receiver.ts';
import {
  ODD_HANDLE,
  STUB_MODEL,
  type Stubbed,
  sayHandle,
  sayJson,
  sayStream,
  startStubbed,
} from '../support/stub-engine.ts';

/** Nothing that baton writes, but the answer to whoever sent it, may hold what looks like this. */
const SECRET = /zz(?:Key|Text|Echo|Conf)\w*/g;
/** A secret that says where it was put. */
const key = (place: string) => `zzKey${place}`;
const said = (place: string) => `zzText${place}`;
const echo = (place: string) => `zzEcho${place}`;
const conf = (place: string) => `zzConf${place}`;

const CLIENT = key('Client');
const TOKEN = key('Token');
const OPERATOR = key('Operator');

let folder: string;
let baton: Stubbed;
let collector: OtlpReceiver;
const at = (name: string) => join(folder, name);

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'baton-secrets-'));
  const hash = (text: string) => `sha256:${createHash('sha256').update(text).digest('hex')}`;
  writeFileSync(at('keys.txt'), `team-a ${hash(CLIENT)}\nteam-b ${hash('other')}\n`);
  writeFileSync(at('tokens.txt'), `own ${hash(TOKEN)} any-tenant\nop ${hash(OPERATOR)} operator any-tenant\n`);
  writeFileSync(at('operator.token'), OPERATOR);
  collector = await startOtlpReceiver();
  baton = await startStubbed({
    prefillBlockSize: 16,
    decodeBlockSizes: [16],
    env: { OPENAI_API_KEY: conf('OpenAi') },
    yaml: `facade: {metrics: true}\npools:\n  prefill: {headers: {x-own: ${conf('Header')}}}\n  decode: {api_key: ${conf('Pool')}}\n`,
    flags: {
      'api-keys-file': at('keys.txt'),
      'rpc-tokens-file': at('tokens.txt'),
      'otlp-endpoint': collector.url,
    },
  });
});
afterAll(async () => {
  await baton?.[Symbol.asyncDispose]();
  await collector?.[Symbol.asyncDispose]();
  rmSync(folder, { recursive: true });
});

/** A request with something secret wherever a client can put text. */
function ask(auth: string, more: object = {}) {
  return fetch(`${baton.url}/v1/chat/completions?key=${key('Query')}`, {
    method: 'POST',
    headers: {
      authorization: auth,
      cookie: `session=${key('Cookie')}`,
      'x-api-key': key('Header'),
      'x-session-id': said('Session'),
      'x-request-id': `${said('RequestId')} with blanks`,
      'x-forwarded-for': said('Forwarded'),
      'user-agent': said('Agent'),
      [said('HeaderName')]: said('HeaderValue'),
    },
    body: JSON.stringify({
      model: STUB_MODEL,
      messages: [
        { role: 'system', content: said('System') },
        { role: 'user', content: said('Prompt') },
        { role: 'assistant', content: said('Answer') },
        { role: 'user', content: said('Last') },
      ],
      user: said('User'),
      tools: [{ type: 'function', function: { name: said('Tool') } }],
      [said('Member')]: said('Value'),
      ...more,
    }),
  }).then(async (reply) => ({ status: reply.status, text: await reply.text() }));
}

/** What the collector got, when it has the spans of as many requests as the log tells of. */
async function traces(): Promise<string> {
  // What a key refuses has a line of its own, and no trace: nothing was done for it.
  const told = baton.log.filter(({ msg, status }) => msg === 'request' && status !== 401).length;
  const sent = () => collector.spans.filter(({ name }) => name === 'POST /v1/chat/completions').length;
  await expect.poll(sent, { timeout: 15_000 }).toBeGreaterThanOrEqual(told);
  expect(told).toBeGreaterThan(10);
  return Buffer.concat([...collector.bodies]).toString('latin1');
}

/** Everything that baton has written, or tells to somebody else; by where. */
async function outputs(): Promise<Readonly<Record<string, string>>> {
  const get = async (url: string, token?: string) =>
    (await fetch(url, token === undefined ? {} : { headers: { authorization: `Bearer ${token}` } })).text();
  const pool = { out: '', err: '' };
  const command = parseCommand(
    ['pool', 'list', '-o', 'wide', '--registry-url', baton.rpcUrl, '--token-file', at('operator.token')],
    () => 'v',
  );
  if (command.kind !== 'pool') throw new Error(JSON.stringify(command));
  const host = {
    env: {},
    out: (text: string) => (pool.out += text),
    err: (text: string) => (pool.err += text),
    stopRequested: () => new Promise<never>(() => undefined),
  };
  expect(await runPool(host, command.request), pool.err).toBe(0);
  writeFileSync(
    at('request.json'),
    JSON.stringify({ model: STUB_MODEL, messages: [{ role: 'user', content: said('Explained') }] }),
  );
  const explained = cliHost([
    'explain',
    at('request.json'),
    '--router-url',
    baton.rpcUrl,
    '--rpc-client-token-file',
    at('operator.token'),
  ]);
  expect(await runCli(explained.host), explained.seen.err).toBe(0);
  const json = baton.log.map((line) => JSON.stringify(line));
  using remote = connectRemote({ url: baton.rpcUrl, token: TOKEN });
  const show = (value: object) =>
    JSON.stringify(value, (_, inner: unknown) => (typeof inner === 'bigint' ? String(inner) : inner));
  return {
    json: json.join('\n'),
    pretty: json.map((line) => formatPretty(line, { color: false })).join('\n'),
    'admin /metrics': await get(`${baton.adminUrl}/metrics`),
    'admin /workers': await get(`${baton.adminUrl}/workers`, OPERATOR),
    'facade /metrics': await get(`${baton.url}/metrics`),
    'facade /health': await get(`${baton.url}/health`),
    'facade /v1/models': await get(`${baton.url}/v1/models`, 'other'),
    'facade for others': await fetch(`${baton.url}/v1/chat/completions`, {
      method: 'POST',
      headers: { authorization: 'Bearer other' },
      body: '{"model":"none","messages":[]}',
    }).then((reply) => reply.text()),
    pools: pool.out + pool.err,
    traces: await traces(),
    explain: explained.seen.out + explained.seen.err,
    instances: show(await remote.poolRegistry.listInstances({})),
    stats: show(await remote.kvCacheStore.getStats({})),
  };
}

test('nothing secret is in anything that baton writes, whatever clients, engines and peers say', {
  timeout: 30_000,
}, async () => {
  const bearer = `Bearer ${CLIENT}`;
  expect((await ask(bearer)).status).toBe(200);
  // A whole turn with a handle, and the next one.
  baton.d.answer = sayJson(
    `{"choices":[{"index":0,"message":{"content":"${echo('Reply')}"},"finish_reason":"stop"}],"kv_transfer_params":${ODD_HANDLE}}`,
  );
  expect((await ask(bearer, { conversation_id: said('Conversation') })).text).toContain(echo('Reply'));
  expect((await ask(bearer, { conversation_id: said('Conversation') })).status).toBe(200);

  // Clients that are refused, in each way.
  for (const auth of [
    `Bearer ${key('Wrong')}`,
    `Basic ${key('Basic')}`,
    key('Bare'),
    `Bearer ${key('A')}.${key('B')}.${key('C')}`,
  ]) {
    const refused = await ask(auth);
    expect([refused.status, refused.text.match(SECRET)]).toEqual([401, null]);
  }
  expect((await ask(bearer, { model: said('Model') })).status).toBe(404);
  expect((await ask(bearer, { kv_transfer_params: { remote_host: said('Host') } })).status).toBe(400);
  for (const body of [
    `{"${said('Broken')}`,
    `[${JSON.stringify(said('List'))}]`,
    `{"a":"${said('Cut')}`,
    said('Plain'),
  ]) {
    const init = { method: 'POST', headers: { authorization: bearer }, body };
    expect((await fetch(`${baton.url}/v1/chat/completions`, init)).status).toBe(400);
  }
  for (const path of [`/${said('Path')}`, `/v1/${said('Path')}?key=${key('Path')}`, '/%zz'])
    await fetch(`${baton.url}${path}`);

  // Engines that write back what they were sent, or anything else, and fail.
  const error = (place: string) =>
    JSON.stringify({
      error: {
        message: `${echo(place)} ${CLIENT} at http://10.0.0.1/`,
        type: echo('Type'),
        param: echo('Param'),
        code: echo('Code'),
      },
    });
  for (const status of [400, 401, 404, 422, 429, 500, 503]) {
    baton.p.answer = sayJson(error(`P${status}`), status, { 'x-echo': echo('Head'), 'retry-after': '1' });
    await ask(bearer);
    baton.p.answer = sayHandle();
    baton.d.answer = sayJson(error(`D${status}`), status);
    await ask(bearer);
  }
  for (const answer of [
    sayJson(`<html>${echo('Page')}</html>`, 502, { 'content-type': 'text/html' }),
    sayJson(echo('NoJson')),
    sayStream([`data: ${error('First')}\n\n`]),
    sayStream([`data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n`, `data: ${error('Late')}\n\n`]),
    sayStream([`${echo('NoEvent')}\n\n`, `data: ${echo('NoJson')}\n\n`]),
    sayStream([`data: {"choices":[{"index":0,"delta":{"content":"${echo('Cut')}"}}]}\n\n`]),
  ]) {
    baton.d.answer = answer;
    await ask(bearer, { stream: true });
    baton.p.answer = answer;
    await ask(bearer);
    baton.p.answer = sayHandle();
  }
  for (const handle of [
    `{"remote_host":"${echo('Host')}"}`,
    `"${echo('Handle')}"`,
    `{"do_remote_prefill":"${echo('Flag')}","remote_block_ids":[["${echo('Block')}"]]}`,
  ]) {
    baton.p.answer = sayHandle(handle);
    await ask(bearer);
  }
  baton.reset();

  // Peers on the RPC and the admin port.
  for (const token of [key('RpcWrong'), TOKEN]) {
    using remote = connectRemote({ url: baton.rpcUrl, token });
    const noted = { code: 0 };
    const fail = () => (noted.code += 1);
    await remote.kvCacheStore
      .getEntry({
        selector: {
          case: 'key',
          value: { tenant: 'team-a', model: said('RpcModel'), conversationId: said('RpcConversation') },
        },
      })
      .catch(fail);
    await remote.poolRegistry.drainInstance({ instanceId: said('RpcInstance'), reason: said('RpcReason') }).catch(fail);
    await remote.router.planRoute({ facts: { model: said('RpcPlan'), tenant: 'team-a' } }).catch(fail);
    expect(noted.code).toBeGreaterThan(0);
  }
  for (const type of ['application/json', 'application/proto']) {
    const init = {
      method: 'POST',
      headers: { authorization: `Bearer ${TOKEN}`, 'content-type': type },
      body: `{"${said('RpcBroken')}`,
    };
    await fetch(`${baton.rpcUrl}/baton.v1.KVCacheStore/GetStats`, init);
  }
  for (const [path, token, body] of [
    ['/workers', OPERATOR, { url: `http://user:${key('Url')}@127.0.0.1:9`, worker_type: 'prefill' }],
    ['/workers', key('AdminWrong'), {}],
    [`/workers/${said('Worker')}/drain`, OPERATOR, { reason: 1 }],
    ['/-/reload', key('AdminWrong'), {}],
  ] as const) {
    const reply = await fetch(`${baton.adminUrl}${path}`, {
      method: 'POST',
      headers: { authorization: `Bearer ${token}` },
      body: JSON.stringify(body),
    });
    expect(reply.status, path).toBeGreaterThanOrEqual(400);
    expect(await reply.text(), path).not.toMatch(/zzKey/);
  }

  const written = await outputs();
  expect(baton.log.length).toBeGreaterThan(40);
  for (const [where, text] of Object.entries(written)) {
    expect(text.length, where).toBeGreaterThan(20);
    expect(text.match(SECRET) ?? [], where).toEqual([]);
    expect(text, where).not.toMatch(/remote_block_ids|e\\u002d1/);
  }
});

test('mistakes in settings do not show what is secret in them', () => {
  for (const text of [
    `pools: {decode: {api_key: "two ${conf('Words')}"}}`,
    `pools: {decode: {api_key: [${conf('List')}]}}`,
    `pools: {decode: {headers: {authorization: {x: ${conf('Map')}}}}}`,
    `instances: [{url: "http://user:${conf('Url')}@10.0.0.1", role: decode}]`,
    `store: {backend: valkey, valkey: {url: "http://user:${conf('Store')}@10.0.0.1"}}`,
    `auth: {jwt: {jwks_url: "https://user:${conf('Jwks')}@issuer.test", issuer: a, audience: b}}`,
    `auth: {jwt: {jwks_url: "http://user:${conf('Jwks')}@issuer.test", issuer: a, audience: b}}`,
    `router_url: "http://user:${conf('Peer')}@10.0.0.1"`,
    `openai_api_key: ${conf('Unknown')}`,
    `pools: {decode: {apikey: ${conf('Unknown')}}}`,
  ]) {
    const loaded = loadConfig({ flags: {}, env: {}, fileText: text, known: KNOWN, terminal: false });
    if (loaded.kind === 'ok') throw new Error(`no mistake: ${text}`);
    expect(JSON.stringify(loaded.problems).match(SECRET), text).toBeNull();
  }
  const env = { OPENAI_API_KEY: `two ${conf('Words')}`, BATON_RPC_TOKEN: `two ${conf('Words')}` };
  const loaded = loadConfig({ flags: {}, env, fileText: '', known: KNOWN, terminal: false });
  expect(loaded.kind === 'error' && JSON.stringify(loaded.problems)).not.toMatch(SECRET);
});
