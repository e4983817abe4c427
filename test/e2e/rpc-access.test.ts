import { createHash } from 'node:crypto';
import { copyFileSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { connect as connectTls } from 'node:tls';
import type { MessageInitShape } from '@bufbuild/protobuf';
import { Code, ConnectError } from '@connectrpc/connect';
import { afterEach, expect, test } from 'vitest';
import type { PutEntryRequestSchema } from '../../gen/baton/v1/kv_cache_store_pb.ts';
import { StartError } from '../../src/roles/listen.ts';
import { connectRemote, type RemoteOptions, type RemoteServices } from '../../src/rpc/clients.ts';
import { batonErrorFrom } from '../../src/rpc/errors.ts';
import { startSimPools } from '../../src/sim/pools.ts';
import { configOf, startQuietly } from '../support/harness.ts';
import { CLIENT_TLS, pem, TLS_FOLDER } from '../support/tls.ts';

let stack = new AsyncDisposableStack();
afterEach(async () => {
  await stack.disposeAsync();
  stack = new AsyncDisposableStack();
});

type Flags = Readonly<Record<string, string | readonly string[]>>;

async function start(flags: Flags, yaml?: string) {
  const { baton, log } = await startQuietly(configOf(flags, yaml));
  stack.defer(() => baton.stop());
  return { ...baton.addresses, log };
}

function folder(): string {
  const path = mkdtempSync(join(tmpdir(), 'baton-'));
  stack.defer(() => rmSync(path, { recursive: true }));
  return path;
}

function client(options: RemoteOptions): RemoteServices {
  return stack.use(connectRemote(options));
}

const line = (tenant: string, token: string, ...rights: readonly string[]) =>
  `${tenant} sha256:${createHash('sha256').update(token).digest('hex')} ${rights.join(' ')}\n`;

/** What a call was refused with: the code of the protocol, the reason, and what it names. */
async function refusal(call: Promise<unknown>): Promise<unknown> {
  try {
    await call;
    return 'no refusal';
  } catch (thrown) {
    const { reason, metadata } = batonErrorFrom(thrown, 'INTERNAL');
    return [Code[ConnectError.from(thrown).code], reason, ...Object.values(metadata)];
  }
}

const NO_TOKEN = ['Unauthenticated', 'CREDENTIAL_REQUIRED'];

let calls = 0;

function entry(tenant: string): MessageInitShape<typeof PutEntryRequestSchema> {
  return {
    idempotencyKey: `call-${++calls}`,
    key: { tenant, model: 'm', conversationId: 'c' },
    owner: { instanceId: 'd', engineId: 'e', incarnation: { engineId: 'e', generation: 1 } },
    connector: 'nixl',
    handle: { remoteEngineId: 'e' },
    storedTokens: 200,
    engineBlockSize: 16,
    remainingTtl: { seconds: 400n },
  };
}

const take = (tenant: string) => ({
  idempotencyKey: `call-${++calls}`,
  key: { tenant, model: 'm', conversationId: 'c' },
  allowUnverified: true,
});

test('with a file of tokens each call needs one, which names the tenant and says what it may do', async () => {
  const tokens = join(folder(), 'tokens');
  writeFileSync(
    tokens,
    line('team-a', 'a') +
      line('team-b', 'b', 'unverified') +
      line('router', 'r', 'any-tenant') +
      line('ops', 'o', 'operator'),
  );
  const { rpc } = await start({ roles: 'kvstore,registry,router', 'rpc-tokens-file': tokens }, 'instances: []');
  const url = `http://${rpc}`;
  for (const way of [{}, { httpVersion: '1.1' }, { protocol: 'grpc' }, { protocol: 'grpc-web' }] as const) {
    for (const credential of [{}, { token: 'x' }]) {
      const { kvCacheStore, router, poolRegistry } = client({ url, ...way, ...credential });
      expect([
        await refusal(kvCacheStore.getStats({})),
        await refusal(router.planRoute({})),
        await refusal(poolRegistry.listInstances({})),
        await refusal(poolRegistry.watchInstances({})[Symbol.asyncIterator]().next()),
      ]).toEqual([NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN]);
    }
  }
  const [a, b, r, o] = ['a', 'b', 'r', 'o'].map((token) => client({ url, token }));
  if (a === undefined || b === undefined || r === undefined || o === undefined) throw new Error('no clients');

  // The tenant is the token's, and another one is refused but for those that name tenants.
  const put = await a.kvCacheStore.putEntry(entry(''));
  expect(put.entry?.key?.tenant).toBe('team-a');
  expect(await refusal(b.kvCacheStore.getEntry({ selector: { case: 'key', value: { tenant: 'team-a' } } }))).toEqual([
    'PermissionDenied',
    'TENANT_FORBIDDEN',
    'team-a',
  ]);
  expect((await b.kvCacheStore.listEntries({})).entries).toEqual([]);
  expect((await a.kvCacheStore.listEntries({})).entries).toHaveLength(1);
  await r.kvCacheStore.putEntry(entry('team-b'));
  expect((await r.kvCacheStore.listEntries({})).entries).toHaveLength(2);

  // Takes without a proof, releases, plans and drains need their words.
  expect(await refusal(a.kvCacheStore.takeEntry(take('')))).toEqual(['PermissionDenied', 'UNVERIFIED_NOT_PERMITTED']);
  expect((await b.kvCacheStore.takeEntry(take(''))).result.case).toBe('taken');
  const release = { idempotencyKey: 'release', instanceId: 'd' };
  const forOperators = (method: string) => ['PermissionDenied', 'OPERATOR_REQUIRED', `baton.v1.${method}`];
  expect(await refusal(r.kvCacheStore.takeForRelease(release))).toEqual(forOperators('KVCacheStore/TakeForRelease'));
  expect((await o.kvCacheStore.takeForRelease(release)).taken).toHaveLength(1);
  expect(await refusal(r.poolRegistry.drainInstance({ instanceId: 'd' }))).toEqual(
    forOperators('PoolRegistry/DrainInstance'),
  );
  expect(await refusal(o.poolRegistry.drainInstance({ instanceId: 'd' }))).toEqual(
    expect.arrayContaining(['NotFound']),
  );
  expect(await refusal(a.router.planRoute({}))).toEqual([
    'PermissionDenied',
    'TENANT_FORBIDDEN',
    'baton.v1.Router/PlanRoute',
  ]);
  expect(await refusal(r.router.planRoute({}))).toEqual(expect.arrayContaining(['InvalidArgument']));
  expect((await a.poolRegistry.listInstances({})).instances).toEqual([]);
});

test('the file of tokens is read again; one with a mistake changes nothing', async () => {
  const tokens = join(folder(), 'tokens');
  writeFileSync(tokens, line('team-a', 'a'));
  const { rpc, log } = await start({ roles: 'kvstore', 'rpc-tokens-file': tokens });
  const code = async (token: string) =>
    await refusal(client({ url: `http://${rpc}`, token }).kvCacheStore.getStats({}));
  writeFileSync(tokens, 'team-b nonsense\n');
  await expect.poll(() => JSON.stringify(log), { timeout: 10_000 }).toContain(`${tokens}:1: expected a tenant`);
  expect(await code('a')).toBe('no refusal');
  writeFileSync(tokens, line('team-b', 'b'));
  await expect.poll(() => code('a'), { timeout: 10_000 }).toEqual(NO_TOKEN);
  expect(await code('b')).toBe('no refusal');
});

test('without tokens callers are told apart by what they show, may name tenants, and need proofs', async () => {
  const safe = `http://${(await start({ roles: 'kvstore' })).rpc}`;
  const tenantOf = async (token: Pick<RemoteOptions, 'token'>) =>
    (await client({ url: safe, ...token }).kvCacheStore.putEntry(entry(''))).entry?.key?.tenant;
  expect(await tenantOf({})).toBe('anonymous');
  expect(await tenantOf({ token: 'x' })).toMatch(/^cred-[0-9a-f]{32}$/);
  expect(await tenantOf({ token: 'y' })).not.toBe(await tenantOf({ token: 'x' }));
  const { kvCacheStore } = client({ url: safe });
  expect((await kvCacheStore.putEntry(entry('team-a'))).entry?.key?.tenant).toBe('team-a');
  await kvCacheStore.takeForRelease({ idempotencyKey: 'r', instanceId: 'd' });
  expect(await refusal(kvCacheStore.takeEntry(take('team-a')))).toEqual([
    'PermissionDenied',
    'UNVERIFIED_NOT_PERMITTED',
  ]);
  const unsafe = client({ url: `http://${(await start({ roles: 'kvstore', 'unsafe-reuse': 'true' })).rpc}` });
  await unsafe.kvCacheStore.putEntry(entry('t'));
  expect((await unsafe.kvCacheStore.takeEntry(take('t'))).result.case).toBe('taken');
});

test.each([
  ['no token', undefined, 'router', /a token is needed/],
  ['a token that acts for one tenant', 'team', 'router', /acts for any tenant/],
  ['the port of a store', 'roles', 'kvstore', /is not served by this process/],
] as const)(
  'a facade with %s: clients get 503 and no blame, and the log says what to set',
  async (_, token, asked, cause) => {
    const path = folder();
    const tokens = join(path, 'tokens');
    writeFileSync(tokens, `${line('roles', 'roles', 'any-tenant', 'operator')}${line('team', 'team')}`);
    const engines = stack.use(await startSimPools({ prefill: 1, decode: 1 }));
    const router = await start({
      roles: asked === 'router' ? 'kvstore,registry,router' : 'kvstore',
      'rpc-tokens-file': tokens,
      ...(asked === 'router' ? { prefill: engines.prefill[0]?.url ?? '', decode: engines.decode[0]?.url ?? '' } : {}),
    });
    const file = join(path, 'token');
    writeFileSync(file, `${token}\n`);
    const facade = await start(
      {
        roles: 'facade',
        'router-url': `http://${router.rpc}`,
        ...(token === undefined ? {} : { 'rpc-client-token-file': file }),
      },
      'timeouts: {router: 300ms, queue: 300ms}\n',
    );
    const reply = await fetch(`http://${facade.facade}/v1/chat/completions`, {
      method: 'POST',
      body: JSON.stringify({ model: 'sim-model', messages: [{ role: 'user', content: 'hi' }] }),
    });
    expect([reply.status, reply.headers.get('retry-after')]).toEqual([503, '1']);
    const { error } = (await reply.json()) as { error: Record<string, unknown> };
    expect(error).toMatchObject({ code: 'router_unavailable', message: 'The router does not answer.' });
    await expect.poll(() => facade.log.filter(({ level }) => level === 'error')).not.toEqual([]);
    const told = facade.log.filter(({ msg }) => String(msg).startsWith('the router refuses'));
    expect(told).toEqual([expect.objectContaining({ cause: expect.stringMatching(cause) })]);
    expect((await fetch(`http://${facade.facade}/readiness`)).status).toBe(503);
  },
);

test('each role apart, over mTLS with tokens and over unix sockets: a second turn hits', async () => {
  const path = folder();
  const tokens = join(path, 'tokens');
  const token = join(path, 'token');
  writeFileSync(tokens, line('roles', 'secret', 'any-tenant', 'operator'));
  writeFileSync(token, 'secret\n');
  const file = (name: string) => join(TLS_FOLDER, name);
  const [cert, key] = [join(path, 'cert'), join(path, 'key')];
  copyFileSync(file('server.pem'), cert);
  copyFileSync(file('server.key'), key);
  const server = {
    'rpc-tokens-file': tokens,
    'rpc-tls-cert': cert,
    'rpc-tls-key': key,
    'rpc-tls-client-ca': file('ca.pem'),
  };
  const peer = {
    'rpc-client-token-file': token,
    'rpc-client-ca': file('ca.pem'),
    'rpc-client-cert': file('client.pem'),
    'rpc-client-key': file('client.key'),
  };
  const pools = stack.use(await startSimPools({ prefill: 1, decode: 1, engine: { bidirectional: true, eosEvery: 0 } }));
  const urls = (sims: readonly { readonly url: string }[]) => sims.map(({ url }) => url);
  const socket = join(path, 'store.sock');
  const store = await start({ roles: 'kvstore', 'rpc-port': 'off', 'rpc-socket': socket, 'rpc-tokens-file': tokens });
  expect([store.rpc, store.rpcSocket]).toEqual([undefined, socket]);
  const registry = await start({
    ...server,
    roles: 'registry',
    'rpc-host': '0.0.0.0',
    prefill: urls(pools.prefill),
    decode: urls(pools.decode),
  });
  const port = registry.rpc?.split(':').at(-1);
  const elsewhere = { 'kvstore-url': `unix:${socket}`, 'registry-url': `https://localhost:${port}` };
  // A store that has just started may be slow at its first call.
  const patient = 'timeouts: { store: 10s }';
  const router = await start({ ...server, ...peer, roles: 'router', ...elsewhere }, patient);
  const facade = await start({ ...peer, roles: 'facade', 'router-url': `https://${router.rpc}` });
  const url = `http://${facade.facade}`;
  await expect.poll(async () => (await fetch(`${url}/readiness`)).status, { timeout: 10_000 }).toBe(200);
  const messages = [{ role: 'user', content: 'a turn of some length '.repeat(8) }];
  const ask = async (conversation: string) => {
    const body = JSON.stringify({ model: 'sim-model', messages, max_tokens: 20, conversation_id: conversation });
    const headers = { 'x-baton-debug': '1' };
    const reply = await fetch(`${url}/v1/chat/completions`, { method: 'POST', body, headers });
    const { choices } = (await reply.json()) as { choices: [{ message: { content: string } }] };
    return { text: choices[0].message.content, plan: reply.headers.get('x-baton-plan') };
  };
  const { text } = await ask('c');
  const { kvCacheStore } = client({ url: `unix:${socket}`, token: 'secret' });
  await expect.poll(async () => (await kvCacheStore.getStats({})).entries).toBe(1);
  messages.push({ role: 'assistant', content: text }, { role: 'user', content: 'and then?' });
  expect((await ask('c')).plan).toMatch(/outcome=hit;/);

  // A certificate alone is no token, and a token alone no certificate.
  const over = { url: `https://${router.rpc}`, tls: CLIENT_TLS };
  expect(await refusal(client(over).router.explainRoute({}))).toEqual(NO_TOKEN);
  const bare = client({ ...over, tls: { ca: pem('ca.pem') }, token: 'secret' });
  expect(await refusal(bare.router.explainRoute({}))).not.toEqual('no refusal');
  // Certificates that are replaced hold for the next connection.
  copyFileSync(file('server-2.pem'), cert);
  copyFileSync(file('server-2.key'), key);
  await expect.poll(() => shownBy(router.rpc), { timeout: 10_000 }).toBe('server-2');
  for (const { log } of [store, registry, router, facade]) expect(JSON.stringify(log)).not.toContain('secret');
});

async function shownBy(address: string | undefined): Promise<unknown> {
  const socket = connectTls({ port: Number(address?.split(':').at(-1)), host: '127.0.0.1', ...CLIENT_TLS });
  const shown = Promise.withResolvers<unknown>();
  socket.once('secureConnect', () => shown.resolve(socket.getPeerCertificate().subject.CN));
  socket.once('error', shown.reject);
  return shown.promise.finally(() => socket.destroy());
}

test('files that cannot be used are errors of the start, with their key', async () => {
  const path = folder();
  const empty = join(path, 'empty');
  writeFileSync(empty, '');
  const cert = join(TLS_FOLDER, 'server.pem');
  const failed = async (flags: Flags) => {
    const error: unknown = await start({ roles: 'kvstore', ...flags }).catch((thrown: unknown) => thrown);
    expect(error).toBeInstanceOf(StartError);
    return String(error);
  };
  expect(await failed({ 'rpc-tls-cert': cert, 'rpc-tls-key': join(TLS_FOLDER, 'client.key') })).toContain(
    'rpc.tls.key',
  );
  expect(await failed({ 'rpc-tls-cert': cert, 'rpc-tls-key': join(path, 'none') })).toContain('does not exist');
  expect(await failed({ 'rpc-tokens-file': empty })).toContain(`${empty}: has no key`);
  expect(await failed({ 'rpc-socket': join(path, 'none', 'x') })).toMatch(/does not exist \(--rpc-socket\)$/);
  const elsewhere = { roles: 'facade', 'router-url': 'http://127.0.0.1:1', 'rpc-client-token-file': empty };
  expect(await failed(elsewhere)).toContain(`rpc_client.token_file: ${empty}: expected a key without white space`);
});
