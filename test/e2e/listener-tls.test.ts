import { createHash, X509Certificate } from 'node:crypto';
import { copyFileSync, mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { connect as connectTls } from 'node:tls';
import { Agent, request } from 'undici';
import { afterAll, beforeAll, describe, expect, test } from 'vitest';
import { configOf, startQuietly } from '../support/harness.ts';
import { STUB_MODEL, type Stubbed, startStubbed } from '../support/stub-engine.ts';
import { pem, TLS_FOLDER } from '../support/tls.ts';

let folder: string;
let baton: Stubbed;
const at = (name: string) => join(folder, name);
const TOKENS = { op: 'op-token-1', reader: 'read-token-1' };

/** Puts the certificates of a name in the place of those that a server uses. */
function install(name: string): void {
  for (const ending of ['key', 'pem']) {
    copyFileSync(join(TLS_FOLDER, `${name}.${ending}`), at(`next.${ending}`));
    renameSync(at(`next.${ending}`), at(`live.${ending}`));
  }
}

beforeAll(async () => {
  folder = mkdtempSync(join(tmpdir(), 'baton-tls-'));
  install('server');
  const hash = (token: string) => createHash('sha256').update(token).digest('hex');
  writeFileSync(at('tokens.txt'), `op sha256:${hash(TOKENS.op)} operator\nprom sha256:${hash(TOKENS.reader)}\n`);
  const ca = join(TLS_FOLDER, 'ca.pem');
  baton = await startStubbed({
    flags: {
      ...{ 'tls-cert': at('live.pem'), 'tls-key': at('live.key'), 'tls-client-ca': ca },
      ...{ 'admin-tls-cert': at('live.pem'), 'admin-tls-key': at('live.key'), 'admin-tokens-file': at('tokens.txt') },
    },
  });
});
afterAll(async () => {
  await baton?.[Symbol.asyncDispose]();
  rmSync(folder, { recursive: true });
});

/** Asks over a new connection, with the certificate of a name or without one. */
async function ask(url: string, as: string | undefined, init: Parameters<typeof request>[1] = {}) {
  const client = as === undefined ? {} : { cert: pem(`${as}.pem`), key: pem(`${as}.key`) };
  const dispatcher = new Agent({ connect: { ca: pem('ca.pem'), ...client } });
  try {
    const { statusCode, body } = await request(url.replace('http:', 'https:'), { ...init, dispatcher });
    return { status: statusCode, text: await body.text() };
  } finally {
    await dispatcher.destroy();
  }
}

const chat = (as: string | undefined) =>
  ask(`${baton.url}/v1/chat/completions`, as, {
    method: 'POST',
    body: JSON.stringify({ model: STUB_MODEL, messages: [{ role: 'user', content: 'hi' }] }),
  });

/** The certificate that a port shows. */
function shown(port: number): Promise<string> {
  return new Promise((resolve, reject) => {
    const identity = { ca: pem('ca.pem'), cert: pem('client.pem'), key: pem('client.key') };
    const socket = connectTls({ port, host: '127.0.0.1', ...identity }, () => {
      resolve(socket.getPeerX509Certificate()?.fingerprint256 ?? '');
      socket.destroy();
    });
    socket.once('error', reject);
  });
}

/** When the certificates in use end, as the metrics tell it: seconds by what they are for. */
async function toldEnds(): Promise<Readonly<Record<string, number>>> {
  const { text } = await ask(`${baton.adminUrl}/metrics`, undefined, {
    headers: { authorization: `Bearer ${TOKENS.reader}` },
  });
  const lines = text.matchAll(/^baton_tls_certificate_expiry_timestamp_seconds\{use="(\w+)"\} (\S+)$/gm);
  return Object.fromEntries([...lines].map(([, use, seconds]) => [use, Number(seconds)]));
}

const endOf = (name: string) => new X509Certificate(pem(`${name}.pem`)).validToDate.getTime() / 1000;
const printOf = (name: string) => new X509Certificate(pem(`${name}.pem`)).fingerprint256;

describe('the facade with TLS and certificates of clients', () => {
  test('serves who has one of these authorities', async () => {
    expect(await chat('client')).toMatchObject({ status: 200, text: expect.stringContaining('hello') });
  });

  test('turns away who has none, one of others, or an expired one, and says so once in the log', async () => {
    baton.reset();
    for (const as of [undefined, 'stranger', 'expired']) await expect(chat(as), as).rejects.toThrow();
    expect(baton.p.requests).toEqual([]);
    await expect
      .poll(() => baton.log.filter(({ msg }) => msg === 'a connection failed in its TLS handshake'))
      .toEqual([
        expect.objectContaining({ level: 'warn', listener: 'facade', cause: expect.stringMatching(/^ERR_SSL_|_/) }),
      ]);
  });

  test('shows a renewed certificate to new connections, and keeps the old one while the new one is of no use', async () => {
    expect(await shown(baton.port)).toBe(printOf('server'));
    expect(await toldEnds()).toEqual({ facade: endOf('server'), admin: endOf('server') });
    install('server-2');
    await expect.poll(() => shown(baton.port), { timeout: 10_000 }).toBe(printOf('server-2'));
    await expect.poll(toldEnds, { timeout: 10_000 }).toEqual({ facade: endOf('server-2'), admin: endOf('server-2') });
    install('expired');
    const complaint = () => baton.log.findLast(({ level }) => level === 'error');
    await expect.poll(complaint, { timeout: 10_000 }).toMatchObject({ cause: expect.stringContaining('expired on') });
    expect(await shown(baton.port)).toBe(printOf('server-2'));
    expect(await toldEnds()).toMatchObject({ facade: endOf('server-2') });
    expect((await chat('client')).status).toBe(200);
  });
});

describe('the admin port with tokens of its own', () => {
  const admin = (path: string, token?: string, method: 'GET' | 'POST' = 'GET') =>
    ask(`${baton.adminUrl}${path}`, undefined, {
      method,
      ...(token === undefined ? {} : { headers: { authorization: `Bearer ${token}` } }),
    });

  test('tells nobody without a token more than that it lives', async () => {
    expect((await admin('/liveness')).status).toBe(200);
    for (const path of ['/metrics', '/workers', '/nowhere']) {
      expect((await admin(path)).status, path).toBe(401);
      expect((await admin(path, 'op-token-2')).status, path).toBe(401);
    }
    expect(await admin('/metrics', TOKENS.reader)).toMatchObject({
      status: 200,
      text: expect.stringMatching(/^# HELP/),
    });
    expect((await admin('/workers', TOKENS.reader)).status).toBe(200);
  });

  test('changes are for operators', async () => {
    expect((await admin('/-/reload', undefined, 'POST')).status).toBe(401);
    expect((await admin('/-/reload', TOKENS.reader, 'POST')).status).toBe(403);
    // There is no file to read again.
    expect((await admin('/-/reload', TOKENS.op, 'POST')).status).toBe(409);
  });
});

test('an end does not wait for connections without a handshake', { timeout: 20_000 }, async () => {
  install('server');
  const flags = { 'tls-cert': at('live.pem'), 'tls-key': at('live.key'), 'drain-timeout': '0' };
  const { baton: own } = await startQuietly(configOf(flags, 'instances: []\n'));
  const port = Number(own.addresses.facade?.split(':').at(-1));
  const silent = connect(port, '127.0.0.1');
  await new Promise((resolve) => silent.once('connect', resolve));
  const idle = connectTls({ port, host: '127.0.0.1', ca: pem('ca.pem') });
  await new Promise((resolve) => idle.once('secureConnect', resolve));
  for (const socket of [silent, idle]) socket.on('error', () => undefined);
  await own.stop();
  await expect.poll(() => silent.closed && idle.closed).toBe(true);
});

describe('what cannot be used is a sentence at the start', () => {
  const start = (cert: string, key: string) =>
    startQuietly(configOf({ 'tls-cert': cert, 'tls-key': key }, 'instances: []\n')).then(({ baton: own }) =>
      own.stop(),
    );
  const fixture = (name: string) => join(TLS_FOLDER, name);

  test('an expired certificate', async () => {
    await expect(start(fixture('expired.pem'), fixture('expired.key'))).rejects.toThrow(
      /^facade\.tls\.cert, facade\.tls\.key: the certificate expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC; renew it$/,
    );
  });

  test('a key of another certificate, and a file that is none', async () => {
    await expect(start(fixture('server.pem'), fixture('client.key'))).rejects.toThrow('the key is not that of');
    await expect(start(fixture('server.pem'), folder)).rejects.toThrow(/^facade\.tls\.key: .*is a directory/);
    await expect(start(fixture('server.pem'), at('nowhere.key'))).rejects.toThrow(
      /^facade\.tls\.key: .*does not exist/,
    );
  });
});
