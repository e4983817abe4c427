import { afterEach, expect, test } from 'vitest';
import type { Config } from '../../src/config/config.ts';
import { type Running, startBaton } from '../../src/roles.ts';
import { encodeNotice, NoticeSocket } from '../../src/sim/notice-socket.ts';
import { freePort } from '../support/free-port.ts';
import { contentOf, post, startQuietly } from '../support/harness.ts';
import { type LmcacheHarness, startLmcache } from '../support/lmcache.ts';

const open: AsyncDisposable[] = [];
afterEach(async () => {
  while (open.length > 0) await open.pop()?.[Symbol.asyncDispose]();
});

// Without a limit a request whose notices got lost never ends.
async function startHub(): Promise<LmcacheHarness> {
  const port = await freePort();
  const harness = await startLmcache({
    ranks: 2,
    lmcache: `notice_timeout: 0, notice_publish: "tcp://127.0.0.1:${port}"`,
  });
  open.push(harness);
  return harness;
}

/** The same configuration, for a replica that gets the other one's notices. */
function joining({ lmcache, ...config }: Config): Config {
  const { noticePublish, ...rest } = lmcache;
  return { ...config, lmcache: { ...rest, ...(noticePublish === undefined ? {} : { noticeHub: noticePublish }) } };
}

async function startReplica(config: Config): Promise<Running> {
  const { baton } = await startQuietly(joining(config));
  open.push({ [Symbol.asyncDispose]: () => baton.stop() });
  return baton;
}

async function noticed(admin: string, result: string): Promise<number> {
  const text = await (await fetch(`${admin}/metrics`)).text();
  return Number(new RegExp(`^baton_lmcache_notices_total\\{result="${result}"\\} (\\d+)`, 'm').exec(text)?.[1] ?? 0);
}

/** Resolves when notices that come to the socket reach the replica. */
async function joined(harness: LmcacheHarness, admin: string): Promise<void> {
  const socket = new NoticeSocket(harness.notices);
  const before = await noticed(admin, 'orphan');
  const tell = async () => {
    await socket.send(encodeNotice('of-nobody'));
    return noticed(admin, 'orphan');
  };
  await expect.poll(tell, { timeout: 20_000 }).toBeGreaterThan(before);
  socket.close();
}

/** Sends requests to every facade at once; each answer must be the plain engine's, and by way of a hand-over. */
async function ask(harness: LmcacheHarness, urls: readonly string[], each: number): Promise<void> {
  const work = urls.flatMap((url) => Array.from({ length: each }, (_, i) => ({ url, i })));
  await Promise.all(
    work.map(async ({ url, i }) => {
      const messages = [{ role: 'user', content: `${i} Who picked the baton up?` }];
      const body = { model: 'sim-model', messages, max_tokens: 12, stream: i % 2 === 0 };
      const got = await post(`${url}/v1/chat/completions`, body, { headers: { 'x-baton-debug': '1' } });
      const want = await post(`${harness.plain.url}/v1/chat/completions`, body);
      expect(got.status, got.text).toBe(200);
      expect(contentOf(got.text)).toMatchObject({ texts: contentOf(want.text).texts, errors: [] });
      expect(got.headers.get('x-baton-plan')).toContain('mode=prefill_decode;');
      expect(got.headers.get('x-baton-plan')).not.toContain('no_');
    }),
  );
}

test('two replicas on one pool: each gets its notices, also when the one with the socket was away', async () => {
  const harness = await startHub();
  const replica = await startReplica(harness.config);
  expect(replica.addresses.notices).toBeUndefined();
  const [url, admin] = [`http://${replica.addresses.facade}`, `http://${replica.addresses.admin}`];
  await joined(harness, admin);
  await ask(harness, [harness.url, url], 12);
  // Two ranks, two notices; each replica sees those of the other one as nobody's.
  expect(await noticed(admin, 'matched')).toBe(24);
  expect(await noticed(harness.adminUrl, 'matched')).toBe(24);
  expect(await noticed(harness.adminUrl, 'orphan')).toBeGreaterThanOrEqual(24);

  const again = await harness.restart();
  await joined(harness, admin);
  await ask(harness, [again, url], 4);
  expect(await noticed(admin, 'matched')).toBe(32);
});

test('what is no notice is not passed on', async () => {
  const harness = await startHub();
  const replica = await startReplica(harness.config);
  const admin = `http://${replica.addresses.admin}`;
  await joined(harness, admin);
  const socket = new NoticeSocket(harness.notices);
  await socket.send(Uint8Array.of(0xc1), new TextEncoder().encode('{"req_id":1}'));
  await expect.poll(() => noticed(harness.adminUrl, 'bad')).toBe(2);
  socket.close();
  await joined(harness, admin);
  expect([await noticed(admin, 'bad'), await noticed(admin, 'ignored')]).toEqual([0, 0]);
});

test('a port in use ends the start, and the other one is free again', async () => {
  const { config } = await startHub();
  const start = (own: Partial<Config['lmcache']>) => startBaton({ ...config, lmcache: { ...config.lmcache, ...own } });
  const inUse = /^port \d+ is in use \(lmcache\.notice_publish\)$/;
  await expect(start({ proxyPort: await freePort() })).rejects.toThrow(inUse);
  const noticePublish = { host: '127.0.0.1', port: await freePort() };
  const proxyInUse = /\(--proxy-port\)$/;
  await expect(start({ noticePublish })).rejects.toThrow(proxyInUse);
  // ZMQ gives a port back a moment after its socket is closed.
  const again = () => start({ noticePublish }).then(String, ({ message }: Error) => message);
  await expect.poll(again, { timeout: 5000 }).toMatch(proxyInUse);
});
