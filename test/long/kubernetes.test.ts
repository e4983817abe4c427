import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createClient } from '@connectrpc/connect';
import { createGrpcTransport } from '@connectrpc/connect-node';
import { expect, onTestFinished, test } from 'vitest';
import { Health, HealthCheckResponse_ServingStatus as Status } from '../../gen/grpc/health/v1/health_pb.ts';
import { startSimPools } from '../../src/sim/pools.ts';
import { type BatonProcess, startBatonProcess } from '../support/baton-process.ts';
import { Conversation } from '../support/conversation.ts';
import { post } from '../support/harness.ts';
import { FakeKubeApi } from '../support/kube-api.ts';
import { type BatonWorkload, batonsOf, layPod, readManifests, SECRET, workloadsOf } from '../support/manifests.ts';
import { needsRedis, RedisServer } from '../support/redis.ts';
import { waitUntil } from '../support/wait.ts';

// What a pod listens on is given by the port that a test finds free instead.
const LISTENS = /^--((rpc|admin)-)?(host|port)=/;

/** Whether a probe of a container finds what it looks for. */
async function passes(pod: BatonWorkload, running: BatonProcess, kind: 'livenessProbe' | 'readinessProbe') {
  const { httpGet, grpc } = pod.container[kind];
  if (httpGet !== undefined) {
    const base = { http: running.url, admin: running.adminUrl }[httpGet.port] ?? '';
    return (await fetch(`${base}${httpGet.path}`)).status === 200;
  }
  const transport = createGrpcTransport({ baseUrl: `http://${running.rpc}` });
  const { status } = await createClient(Health, transport).check({ service: grpc?.service ?? '' });
  return status === Status.SERVING;
}

/** Starts the pods of a case as processes of this machine, the ones first that others call; resolves with the front door. */
async function startPods(name: string, services: Map<string, string>, kubeconfig: string, stack: AsyncDisposableStack) {
  const manifests = readManifests(name);
  const scratch = mkdtempSync(join(tmpdir(), 'baton-pods-'));
  onTestFinished(() => rmSync(scratch, { recursive: true }));
  const started: { readonly pod: BatonWorkload; readonly running: BatonProcess }[] = [];
  for (const pod of batonsOf(manifests).toSorted((a, b) => rank(a) - rank(b))) {
    const root = join(scratch, pod.name);
    mkdirSync(root);
    const [, ...args] = layPod(pod, manifests, root, services).filter((arg) => !LISTENS.test(arg));
    const running = stack.use(await startBatonProcess(args, { KUBECONFIG: kubeconfig }));
    services.set(pod.name, running.rpc);
    started.push({ pod, running });
  }
  return started;
}

const ORDER = ['baton-kvstore', 'baton-registry', 'baton-router', 'baton-facade'];
const rank = (pod: BatonWorkload) => ORDER.indexOf(pod.name);

test.for(['all-in-one', 'split', 'tls'])('the pods of %s serve, and their probes say so', async (name, context) => {
  if (name === 'split') needsRedis(context);
  await using stack = new AsyncDisposableStack();
  const engines = stack.use(await startSimPools({ prefill: 1, decode: 1, engine: { bidirectional: true } }));
  const plain = stack.use(await startSimPools({ prefill: 0, decode: 1 })).decode[0];
  const api = stack.use(await FakeKubeApi.start('baton'));
  const kubeconfig = join(mkdtempSync(join(tmpdir(), 'baton-kube-')), 'config');
  onTestFinished(() => rmSync(join(kubeconfig, '..'), { recursive: true }));
  writeFileSync(kubeconfig, api.kubeconfig);

  const services = new Map<string, string>();
  const [valkey] = workloadsOf(readManifests(name)).filter(({ kind }) => kind === 'StatefulSet');
  if (valkey !== undefined) {
    const [, ...args] = valkey.spec.template.spec.containers[0]?.args ?? [];
    const redis = stack.use(await RedisServer.start(args.map((arg) => arg.replace('$(VALKEY_PASSWORD)', SECRET))));
    services.set('baton-valkey', `127.0.0.1:${redis.port}`);
  }
  const pods = await startPods(name, services, kubeconfig, stack);
  const door = pods.find(({ running }) => running.url !== '');
  if (door === undefined || plain === undefined) throw new Error('there is no front door');
  for (const { pod, running } of pods) expect(await passes(pod, running, 'livenessProbe'), pod.name).toBe(true);
  for (const each of pods) if (each !== door) expect(await passes(each.pod, each.running, 'readinessProbe')).toBe(true);

  // Metrics are for whoever shows the token of the ServiceMonitor, where the case has one.
  for (const { pod, running } of pods) {
    const metrics = (headers: Readonly<Record<string, string>>) => fetch(`${running.adminUrl}/metrics`, { headers });
    const isGuarded = pod.container.args.some((arg) => arg.startsWith('--admin-tokens-file='));
    expect([(await metrics({})).status, isGuarded]).toEqual(name === 'split' ? [401, true] : [200, false]);
    expect((await metrics({ authorization: `Bearer ${SECRET}` })).status).toBe(200);
  }

  // Without engines the front door is not ready; the registry has them from the API server.
  expect(await passes(door.pod, door.running, 'readinessProbe')).toBe(false);
  for (const [role, [sim]] of [
    ['prefill', engines.prefill],
    ['decode', engines.decode],
  ] as const) {
    const port = Number(new URL(sim?.url ?? '').port);
    api.put(role, { labels: { app: 'vllm', 'llm-d.ai/role': role }, addresses: ['127.0.0.1'], port });
  }
  await waitUntil(() => passes(door.pod, door.running, 'readinessProbe'));

  const conversation = new Conversation('a', { stream: false, plain });
  const send = (body: unknown) =>
    post(`${door.running.url}/v1/chat/completions`, body, {
      headers: { 'x-baton-debug': '1', authorization: `Bearer ${SECRET}` },
    });
  // A store that takes longer than 20 ms, as on a busy machine, is done without.
  await waitUntil(async () => (await conversation.turn(send)) === 'hit');
});
