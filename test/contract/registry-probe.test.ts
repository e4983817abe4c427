import { once } from 'node:events';
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import { type AddressInfo, createServer as createTcpServer, type Server } from 'node:net';
import { describe, expect, it } from 'vitest';
import { InstanceState } from '../../gen/baton/v1/instance_pb.ts';
import { type ProbePart, probeInstance } from '../../src/engine/probe.ts';
import { SILENT_LOGGER } from '../../src/obs/log.ts';
import { PoolRegistryService } from '../../src/services/registry/pool-registry.ts';
import { spec } from '../support/registry.ts';

type Handler = (request: IncomingMessage, response: ServerResponse) => void;
type Routes = Readonly<Record<string, Handler>>;

const ALL: ReadonlySet<ProbePart> = new Set(['models', 'version', 'metrics']);

const text =
  (status: number, body: string): Handler =>
  (_, response) =>
    void response.writeHead(status).end(body);
const silent: Handler = () => {};

const vllm = (startSeconds: number): Routes => ({
  '/health': text(200, ''),
  '/version': text(200, '{"version":"0.33.0"}'),
  '/v1/models': text(200, '{"object":"list","data":[{"id":"m","root":"r","max_model_len":4096}]}'),
  '/metrics': text(
    200,
    `process_start_time_seconds ${startSeconds}\nvllm:num_requests_running{engine="0"} 2\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1\n`,
  ),
});

async function listen(server: Server, port = 0) {
  server.listen(port, '127.0.0.1');
  await once(server, 'listening');
  const address = server.address() as AddressInfo;
  return { port: address.port, url: `http://127.0.0.1:${address.port}` };
}

/** An engine that answers by a table, 404 elsewhere. */
async function engine(routes: Routes, port = 0) {
  const server = createServer((request, response) => {
    seen.push(request);
    (routes[request.url ?? ''] ?? text(404, '{"detail":"Not Found"}'))(request, response);
  });
  const seen: IncomingMessage[] = [];
  const address = await listen(server, port);
  return {
    ...address,
    seen,
    connections: () =>
      new Promise<number>((resolve, reject) =>
        server.getConnections((error, n) => (error ? reject(error) : resolve(n))),
      ),
    async [Symbol.asyncDispose]() {
      const closed = once(server, 'close');
      server.close();
      server.closeAllConnections();
      await closed;
    },
  };
}

const never = new AbortController().signal;
const probe = (url: string, timeoutMs = 2000, parts = ALL) => probeInstance({ url }, parts, timeoutMs, never);

/** A port on which nothing listens. */
async function freePort(): Promise<number> {
  const server = createTcpServer();
  const { port } = await listen(server);
  server.close();
  await once(server, 'close');
  return port;
}

describe('probeInstance', () => {
  it('reads everything of an engine that has everything, and closes its connections', async () => {
    await using stub = await engine(vllm(1000));
    expect(await probe(stub.url)).toEqual({
      health: { kind: 'ok', detail: 'health answered 200' },
      version: '0.33.0',
      models: [
        { id: 'm', root: 'r', parent: '', maxModelLen: 4096, rawJson: '{"id":"m","root":"r","max_model_len":4096}' },
      ],
      metrics: { processStartSeconds: 1000, running: 2, blockSize: 16, numGpuBlocks: 100 },
      kind: 'vllm',
      keyRefused: false,
    });
    await expect.poll(() => stub.connections()).toBe(0);
    expect(stub.seen.map(({ url }) => url)[0]).toBe('/health');
  });

  it.each([
    ['fixed', text(404, '')],
    ['reloadable', text(405, '')],
    ['unknown behind a key', text(401, '')],
  ])('tells that adapters are %s', async (told, route) => {
    const models = text(200, '{"data":[{"id":"m"},{"id":"l","root":"/l","parent":"m"}]}');
    await using stub = await engine({ ...vllm(1), '/v1/models': models, '/v1/load_lora_adapter': route });
    const { adapters } = await probe(stub.url);
    expect(adapters).toBe(told.startsWith('unknown') ? undefined : told);
    await using bare = await engine({ ...vllm(1), '/v1/load_lora_adapter': route });
    expect(await probe(bare.url)).not.toHaveProperty('adapters');
  });

  describe('the fingerprint of a template', () => {
    const template = new Set<ProbePart>(['template']);
    type Answer = (body: { messages?: readonly { role: string }[]; tools?: unknown }) => readonly [number, unknown];
    const fingerprint = async (answer: Answer) => {
      const tokenize: Handler = (request, response) => {
        request.once('data', (body: Uint8Array) => {
          const [status, tokens] = answer(JSON.parse(String(body)));
          response.writeHead(status).end(JSON.stringify({ tokens }));
        });
      };
      await using stub = await engine({ '/health': text(200, ''), '/tokenize': tokenize });
      return (await probe(stub.url, 2000, template)).templateFingerprint;
    };
    const isTools = (body: Parameters<Answer>[0]) => body.tools !== undefined;
    const ends = (body: Parameters<Answer>[0], role: string) => body.messages?.at(-1)?.role === role;

    it('differs where only tools, their results or earlier turns are rendered differently', async () => {
      const told = await Promise.all([
        fingerprint(() => [200, [1, 2]]),
        fingerprint((body) => [200, isTools(body) ? [1, 3] : [1, 2]]),
        fingerprint((body) => [200, ends(body, 'tool') ? [1, 3] : [1, 2]]),
        fingerprint((body) => [200, isTools(body) && ends(body, 'user') ? [1, 3] : [1, 2]]),
        fingerprint((body) => (isTools(body) ? [400, null] : [200, [1, 2]])),
      ]);
      for (const one of told) expect(one).toMatch(/^0:[0-9a-f]{32}$/);
      expect(new Set(told).size).toBe(told.length);
      expect(await fingerprint((body) => (isTools(body) ? [500, null] : [200, [1, 2]]))).toBe(told.at(-1));
    });

    it('is of a text where there is no chat template, and of nothing that is only half known', async () => {
      expect(await fingerprint((body) => (body.messages === undefined ? [200, [1]] : [400, null]))).toMatch(/^1:/);
      expect(await fingerprint((body) => (isTools(body) ? [503, null] : [200, [1]]))).toBeUndefined();
      expect(await fingerprint(() => [404, null])).toBeUndefined();
    });
  });

  it('asks only for the parts that are wanted, and for none of an unhealthy engine', async () => {
    await using stub = await engine(vllm(1000));
    await probe(stub.url, 2000, new Set(['metrics']));
    expect(stub.seen.map(({ url }) => url)).toEqual(['/health', '/metrics']);
    await using dead = await engine({ ...vllm(1), '/health': text(503, '') });
    expect(await probe(dead.url)).toEqual({ health: { kind: 'unhealthy', detail: 'health answered 503' } });
    expect(dead.seen).toHaveLength(1);
  });

  it('sends headers, key and a request for plain bytes on every route, below the prefix', async () => {
    await using stub = await engine({ '/pre/fix/health': text(200, 'OK') });
    const target = { url: `${stub.url}/pre/fix/`, headers: { Authorization: 'Basic x', 'X-Team': 'a' }, apiKey: 'k' };
    expect((await probeInstance(target, ALL, 2000, never)).health.kind).toBe('ok');
    expect(stub.seen.map(({ url }) => url).sort()).toEqual([
      '/pre/fix/health',
      '/pre/fix/metrics',
      '/pre/fix/v1/models',
      '/pre/fix/version',
    ]);
    for (const { headers } of stub.seen) {
      expect(headers).toMatchObject({ authorization: 'Bearer k', 'x-team': 'a', 'accept-encoding': 'identity' });
    }
  });

  it.each<[string, Routes]>([
    ['only a health route', { '/health': text(200, '') }],
    [
      'junk on the others',
      {
        '/health': text(200, ''),
        '/version': text(200, 'v1'),
        '/v1/models': text(200, '<html>'),
        '/metrics': text(404, ''),
      },
    ],
    [
      'errors on the others',
      {
        '/health': text(200, ''),
        '/version': text(500, '{"version":"x"}'),
        '/v1/models': text(401, '{"error":"Unauthorized"}'),
      },
    ],
  ])('is content with %s', async (name, routes) => {
    await using stub = await engine(routes);
    const { health, keyRefused, ...details } = await probe(stub.url);
    expect(health.kind).toBe('ok');
    expect(details).toEqual({});
    const refused = routes['/v1/models'] !== undefined && name === 'errors on the others';
    expect(keyRefused).toBe(refused ? true : undefined);
  });

  const MODELS = '{"object":"list","data":[]}';
  it.each<[string, Routes]>([
    ['a model list', { '/v1/models': text(200, MODELS) }],
    ['a model list for those who have its key', { '/v1/models': text(401, '') }],
    ['a version', { '/version': text(200, '{"version":"0.33.0"}') }],
    ['metrics of an engine', { '/metrics': text(200, 'vllm:num_requests_running 0\n') }],
    ['a model list, and a page as health', { '/health': text(200, '<html>'), '/v1/models': text(200, MODELS) }],
    ['a model list, and 405 as health', { '/health': text(405, ''), '/v1/models': text(200, MODELS) }],
  ])('without a health route is content with %s, whatever parts are wanted', async (_name, routes) => {
    await using stub = await engine(routes);
    expect((await probe(stub.url)).health.kind).toBe('ok');
    expect((await probe(stub.url, 2000, new Set())).health.kind).toBe('ok');
  });

  const page = text(200, '<!doctype html><title>It works</title>');
  it.each<[string, Routes]>([
    ['has none of the routes', {}],
    ['answers everything with a page', { '/health': page, '/version': page, '/v1/models': page, '/metrics': page }],
    ['has other JSON and metrics', { '/v1/models': text(200, '[]'), '/metrics': text(200, 'go_goroutines 4\n') }],
    ['answers 501', { '/health': text(501, ''), '/tokenize': text(501, '') }],
    ['is an engine below another path', vllm(1)],
  ])('finds no engine in a server that %s', async (name, routes) => {
    const below = name.endsWith('path') ? '/foo' : '';
    await using stub = await engine(routes);
    for (const parts of [ALL, new Set<ProbePart>(['metrics']), new Set<ProbePart>(['template'])]) {
      expect(await probe(`${stub.url}${below}`, 2000, parts)).toEqual({
        health: { kind: 'no_engine', detail: expect.stringContaining("no other route is an engine's") },
      });
    }
    await expect.poll(() => stub.connections()).toBe(0);
  });

  it('does not take an engine for none because the route that would prove it fails', async () => {
    await using slow = await engine({ '/v1/models': silent });
    expect((await probe(slow.url, 80)).health.kind).toBe('timeout');
    await using sick = await engine({ '/v1/models': text(503, '') });
    expect((await probe(sick.url)).health).toEqual({ kind: 'unhealthy', detail: '/v1/models answered 503' });
  });

  it('reads nothing from JSON at /metrics', async () => {
    await using stub = await engine({ '/health': text(200, '{}'), '/metrics': text(200, '{"requests": 4}') });
    expect(await probe(stub.url)).toMatchObject({ health: { kind: 'ok' }, metrics: {} });
  });

  it('takes a busy server for healthy, a redirect not', async () => {
    await using busy = await engine({ '/health': text(429, '') });
    expect((await probe(busy.url)).health.kind).toBe('ok');
    await using moved = await engine({
      '/health': (_, response) => void response.writeHead(302, { location: '/other' }).end(),
    });
    expect((await probe(moved.url)).health).toEqual({ kind: 'unhealthy', detail: 'health answered 302' });
    expect(moved.seen).toHaveLength(1);
  });

  it('gives up on a silent health route, and on a body that stalls', async () => {
    await using stub = await engine({ '/health': silent });
    expect((await probe(stub.url, 80)).health.kind).toBe('timeout');
    await using stalls = await engine({ '/health': (_, response) => void response.writeHead(200).write('x') });
    expect((await probe(stalls.url, 80)).health.kind).toBe('timeout');
    await expect.poll(() => stub.connections()).toBe(0);
  });

  it('is healthy although other routes are silent, and has their details not', async () => {
    await using stub = await engine({ ...vllm(7), '/metrics': silent, '/v1/models': silent });
    expect(await probe(stub.url, 150)).toEqual({
      health: { kind: 'ok', detail: 'health answered 200' },
      version: '0.33.0',
    });
  });

  it('stops reading a body without end', async () => {
    const flood: Handler = (_, response) => {
      response.writeHead(200);
      const chunk = 'a'.repeat(1 << 20);
      const more = () => {
        while (!response.destroyed && response.write(chunk));
      };
      response.on('drain', more);
      response.on('error', () => {});
      more();
    };
    await using stub = await engine({ ...vllm(7), '/metrics': flood });
    const result = await probe(stub.url, 10_000);
    expect(result.health.kind).toBe('ok');
    expect(result.metrics).toBeUndefined();
    await expect.poll(() => stub.connections()).toBe(0);
  });

  it('tells a refused connection from a reset one and from something that is no HTTP', async () => {
    expect((await probe(`http://127.0.0.1:${await freePort()}`)).health).toEqual({
      kind: 'refused',
      detail: 'connection refused',
    });
    expect((await probe(`http://localhost:${await freePort()}`)).health.kind).toBe('refused');
    for (const answer of ['', 'SSH-2.0-x\r\n']) {
      const server = createTcpServer((socket) => {
        socket.on('error', () => {});
        socket.once('data', () => socket.end(answer));
      });
      const { url } = await listen(server);
      expect((await probe(url)).health.kind).toBe('reset');
      server.close();
    }
    expect((await probe('http://no-such-host.invalid:1')).health.kind).toBe('unreachable');
  });

  it('rejects when aborted', async () => {
    await using stub = await engine({ '/health': silent });
    const abort = new AbortController();
    const running = probeInstance({ url: stub.url }, ALL, 0, abort.signal);
    await expect.poll(() => stub.seen.length).toBe(1);
    abort.abort();
    await expect(running).rejects.toMatchObject({ name: 'AbortError' });
    await expect.poll(() => stub.connections()).toBe(0);
  });
});

describe('PoolRegistryService over engines', () => {
  it('follows an engine that starts late, dies, and comes back as another process', async () => {
    const port = await freePort();
    const id = `127.0.0.1:${port}`;
    const results: string[] = [];
    await using registry = new PoolRegistryService({
      health: { intervalMs: 40, timeoutMs: 500, failures: 3 },
      log: SILENT_LOGGER,
      onProbe: (kind) => results.push(kind),
    });
    registry.applySource('static', [{ ...spec(id, 'both'), connector: 'none' }]);
    const reached = (state: InstanceState, generation: number) =>
      new Promise<void>((resolve) => {
        const look = () => {
          const [instance] = registry.snapshot();
          if (instance?.state !== state || instance.incarnation?.generation !== generation) return;
          stop();
          resolve();
        };
        const stop = registry.onChange(look);
        look();
      });
    registry.start();
    await expect.poll(() => results).toContain('refused');
    expect(registry.snapshot()[0]?.state).toBe(InstanceState.STARTING);
    {
      await using _first = await engine(vllm(1000), port);
      await reached(InstanceState.READY, 1);
      expect(registry.snapshot()[0]).toMatchObject({ modelsKnown: true, engine: { version: '0.33.0', blockSize: 16 } });
    }
    await reached(InstanceState.SUSPECT, 1);
    await using second = await engine(vllm(2000), port);
    await reached(InstanceState.READY, 2);
    expect(registry.snapshot()[0]?.incarnation?.processStartSeconds).toBe(2000);
    await registry[Symbol.asyncDispose]();
    await expect.poll(() => second.connections()).toBe(0);
    const probes = second.seen.length;
    await new Promise((resolve) => setImmediate(resolve));
    expect(second.seen.length).toBe(probes);
  });
});
