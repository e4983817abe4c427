import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, describe, expect, test } from 'vitest';
import { parse } from 'yaml';
import { z } from 'zod';
import { parseCommand } from '../../src/cli/parse-command.ts';
import type { Config } from '../../src/config/config.ts';
import { loadConfigFile } from '../../src/config/load.ts';
import { KNOWN } from '../../src/known.ts';
import {
  type BatonWorkload,
  batonsOf,
  CASES,
  CHART,
  layPod,
  readManifests,
  workloadsOf,
} from '../support/manifests.ts';

const scratch = mkdtempSync(join(tmpdir(), 'baton-pods-'));
afterAll(() => rmSync(scratch, { recursive: true }));
const configs = new Map<string, Config>();

/** What baton makes of the arguments and files of a pod of a case. */
function configOf(pod: BatonWorkload, name: string): Config {
  const root = join(scratch, name, pod.name);
  const config = configs.get(root) ?? readConfig(pod, name, root);
  configs.set(root, config);
  return config;
}

function readConfig(pod: BatonWorkload, name: string, root: string): Config {
  const command = parseCommand(layPod(pod, readManifests(name), root), () => '');
  if (command.kind !== 'serve') throw new Error(JSON.stringify(command));
  const loaded = loadConfigFile({ flags: command.flags, env: {}, known: KNOWN, terminal: false });
  if (loaded.kind === 'error') throw new Error(JSON.stringify(loaded.problems));
  const { config } = loaded;
  // The case `split` has no TLS; the case `tls` has.
  const hasPlainTokens = config.rpc.tokensFile !== undefined && config.rpc.tls === undefined;
  const warning = (where: string) => ({ where, message: expect.stringMatching(/^tokens cross the network/) });
  expect(loaded.warnings).toEqual(
    name === 'split' ? [warning('--admin-host'), ...(hasPlainTokens ? [warning('--rpc-host')] : [])] : [],
  );
  const { rpc, rpcClient, admin, auth, store } = config;
  const files = [
    ...[rpc.tls?.cert, rpc.tls?.key, rpc.tls?.clientCa, rpc.tokensFile],
    ...[rpcClient.ca, rpcClient.cert, rpcClient.key, rpcClient.tokenFile],
    ...[admin.tokensFile, auth.apiKeysFile, store.valkey?.passwordFile, store.valkey?.caFile],
  ];
  for (const file of files) if (file !== undefined) expect(existsSync(file), file).toBe(true);
  return config;
}

test('every case is committed', () => {
  expect(CASES.toSorted()).toEqual(['all-in-one', 'external-valkey', 'split', 'tls']);
});

describe.each(CASES)('%s', (name) => {
  const manifests = readManifests(name);
  const pods = batonsOf(manifests);
  const all = workloadsOf(manifests);
  const named = (kind: string) => manifests.filter((manifest) => manifest.kind === kind);

  test('baton takes the arguments and the file of every pod, and reads its files', () => {
    const roles = pods.flatMap((pod) => configOf(pod, name).roles);
    expect(roles.toSorted()).toEqual(['facade', 'kvstore', 'registry', 'router']);
  });

  test('ports and probes are those that baton listens on', () => {
    for (const pod of pods) {
      const config = configOf(pod, name);
      const serves = config.roles.some((role) => role !== 'facade');
      const isAlone = config.roles.length === 1;
      expect(pod.container.ports).toEqual([
        ...(config.roles.includes('facade') ? [{ name: 'http', containerPort: config.facade.port }] : []),
        ...(serves && isAlone ? [{ name: 'rpc', containerPort: config.rpc.port }] : []),
        { name: 'admin', containerPort: config.admin.port },
      ]);
      expect([config.facade.host, config.admin.host]).toEqual(['0.0.0.0', '0.0.0.0']);
      expect(config.rpc.host).toBe(serves && isAlone ? '0.0.0.0' : '127.0.0.1');
    }
  });

  test('a pod has the time to end its replies', () => {
    for (const pod of pods) {
      const { drainMs, drainSettleMs } = configOf(pod, name).timeouts;
      const seconds = pod.workload.spec.template.spec.terminationGracePeriodSeconds ?? 30;
      expect(seconds * 1000).toBeGreaterThan(drainMs + drainSettleMs);
    }
  });

  test('every pod runs with as few rights as there are', () => {
    for (const { spec } of all) {
      expect(spec.template.spec.securityContext).toEqual({
        runAsNonRoot: true,
        runAsUser: 65532,
        runAsGroup: 65532,
        fsGroup: 65532,
        seccompProfile: { type: 'RuntimeDefault' },
      });
      const rights = { allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: { drop: ['ALL'] } };
      for (const { securityContext } of spec.template.spec.containers) expect(securityContext).toEqual(rights);
      const writable = spec.template.spec.containers[0]?.volumeMounts.filter(({ readOnly }) => readOnly !== true);
      for (const { mountPath } of writable ?? []) expect(['/tmp', '/data', '/var/lib/baton']).toContain(mountPath);
    }
  });

  test('only a registry that looks at Kubernetes has rights there, and those alone that it needs', () => {
    const looks = pods.filter(({ workload }) => workload.spec.template.spec.automountServiceAccountToken);
    const wanted = pods.filter((pod) => {
      const { roles, discovery } = configOf(pod, name);
      return roles.includes('registry') && discovery.kubernetes !== undefined;
    });
    expect(looks.map((pod) => pod.name)).toEqual(wanted.map((pod) => pod.name));
    const rules = [...named('Role'), ...named('ClusterRole')].map((role) => role['rules']);
    // What src/discovery/kubernetes/api.ts asks for.
    const rule = { apiGroups: ['discovery.k8s.io'], resources: ['endpointslices'], verbs: ['list', 'watch'] };
    expect(rules).toEqual(wanted.map(() => [rule]));
    for (const binding of [...named('RoleBinding'), ...named('ClusterRoleBinding')]) {
      const [pod] = wanted;
      const account = pod?.workload.spec.template.spec.serviceAccountName;
      expect(binding['subjects']).toEqual([{ kind: 'ServiceAccount', name: account, namespace: 'baton' }]);
    }
  });

  const selecting = z.object({ spec: z.object({ selector: z.record(z.string(), z.string()) }) });
  const service = z.object({ spec: z.object({ ports: z.array(z.object({ targetPort: z.string() })) }) });

  test('every Service, NetworkPolicy and budget leads to pods, and every URL to a Service', () => {
    const selects = (selector: Readonly<Record<string, string>>) =>
      all.filter(({ spec }) =>
        Object.entries(selector).every(([key, value]) => spec.template.metadata.labels[key] === value),
      );
    for (const each of all) expect(selects(each.spec.selector.matchLabels)).toEqual([each]);
    for (const each of named('Service')) {
      const found = selects(selecting.parse(each).spec.selector);
      expect(found, each.metadata.name).toHaveLength(1);
      const ports = found.flatMap(({ spec }) => spec.template.spec.containers.flatMap((container) => container.ports));
      for (const { targetPort } of service.parse(each).spec.ports)
        expect(ports.map((port) => port.name)).toContain(targetPort);
    }
    const policies = named('NetworkPolicy').map(
      (each) =>
        z
          .object({ spec: z.object({ podSelector: z.object({ matchLabels: z.record(z.string(), z.string()) }) }) })
          .parse(each).spec,
    );
    expect(policies.flatMap(({ podSelector }) => selects(podSelector.matchLabels))).toHaveLength(all.length);
    const services = named('Service').map(({ metadata }) => metadata.name);
    const hosts = [...JSON.stringify(manifests).matchAll(/(?:https?|valkey):\/\/(baton[a-z-]*):/g)].map(
      ([, host]) => host,
    );
    expect(services).toEqual(expect.arrayContaining(hosts));
  });
});

test('the split roles scale: facades by load, budgets for whatever has more than one pod', () => {
  const manifests = readManifests('split');
  const kinds = (kind: string) => manifests.filter((each) => each.kind === kind).map(({ metadata }) => metadata.name);
  expect(kinds('HorizontalPodAutoscaler')).toEqual(['baton-facade']);
  expect(kinds('PodDisruptionBudget').toSorted()).toEqual(['baton-facade', 'baton-kvstore', 'baton-router']);
  // An autoscaler and a number of replicas would fight.
  const facade = workloadsOf(manifests).find(({ metadata }) => metadata.name === 'baton-facade');
  expect(facade?.spec.replicas).toBeUndefined();
});

test('the ServiceMonitor selects the metrics of every pod', () => {
  const monitor = readManifests('split').find(({ kind }) => kind === 'ServiceMonitor');
  const credentials = { name: 'baton-admin-tokens', key: 'scrape-token' };
  expect(monitor?.['apiVersion']).toBe('monitoring.coreos.com/v1');
  expect(monitor?.['spec']).toEqual({
    selector: { matchLabels: { 'app.kubernetes.io/instance': 'baton', 'baton/metrics': 'true' } },
    endpoints: [{ port: 'admin', path: '/metrics', interval: '15s', authorization: { type: 'Bearer', credentials } }],
  });
  const labelled = readManifests('split').filter(
    ({ kind, metadata }) => kind === 'Service' && JSON.stringify(metadata).includes('"baton/metrics":"true"'),
  );
  expect(labelled).toHaveLength(batonsOf(readManifests('split')).length);
});

test('the chart has the version of the package', () => {
  const { version } = JSON.parse(readFileSync('package.json', 'utf8'));
  expect(parse(readFileSync(join(CHART, 'Chart.yaml'), 'utf8'))).toMatchObject({ version, appVersion: version });
});
