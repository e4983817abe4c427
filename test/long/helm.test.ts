import { execFile } from 'node:child_process';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { afterAll, describe, expect, type TestContext, test } from 'vitest';
import { parse, parseAllDocuments } from 'yaml';
import { helm, renderPlain } from '../support/helm.ts';
import { CASES, CHART, MANIFESTS, readManifests } from '../support/manifests.ts';
import { ALERTS_FILE, DASHBOARD_FILE } from '../support/monitoring.ts';
import { hasTool, skipWithout } from '../support/tools.ts';

const run = promisify(execFile);
const scratch = mkdtempSync(join(tmpdir(), 'baton-chart-'));
afterAll(() => rmSync(scratch, { recursive: true, force: true }));

describe.each(CASES)('the chart for %s', (name) => {
  const values = join(CHART, 'ci', `${name}-values.yaml`);

  test('renders deploy/kubernetes (UPDATE_DOCS=1 writes it)', async (context) => {
    const rendered = await renderPlain(context, values);
    const head = readFileSync(values, 'utf8').split('\n', 1)[0] ?? '';
    const made = `# Made from deploy/helm/baton/ci/${name}-values.yaml; docs/kubernetes.md says how to use it.`;
    const text = `${head}\n${made}\n${rendered}`;
    const file = join(MANIFESTS, `${name}.yaml`);
    if (process.env['UPDATE_DOCS'] !== undefined) writeFileSync(file, text);
    expect(text).toBe(readFileSync(file, 'utf8'));
  });

  test('passes helm lint', async (context) => {
    expect(await helm(context, 'lint', ['--strict', '--values', values])).toContain('0 chart(s) failed');
  });
});

describe('values that cannot be meant are refused', () => {
  const engines = ['--set', 'discovery.selector=app=vllm'];

  test.for([
    ['rcp.insecure=true', "additional properties 'rcp' not allowed"],
    ['rpc.tls.secrets=a', "at '/rpc/tls': additional properties 'secrets' not allowed"],
    ['facade.autoscaling.max=3', "at '/facade/autoscaling': additional properties 'max' not allowed"],
    ['config.timeout=3', "at '/config': additional properties 'timeout' not allowed"],
    ['config.rpc.port=3', "at '/config': additional properties 'rpc' not allowed"],
    ['mode=both', "at '/mode': value must be one of 'all-in-one', 'split'"],
    ['service.port=0', "at '/service/port': minimum: got 0, want 1"],
    ['store.valkey.url=valkey://user:secret@host', "at '/store/valkey/url':"],
    ['discovery.selector=', 'where are the engines? Set discovery.selector,'],
    ['mode=split', 'they know no callers: set rpc.tokens.secret,'],
    ['rpc.expose=true', 'they know no callers: set rpc.tokens.secret,'],
    ['rpc.tls.mutual=true', 'rpc.tls.mutual needs rpc.tls.secret'],
    ['allInOne.replicas=2', 'several processes with a store need store.backend=valkey'],
    ['store.backend=valkey', 'needs store.valkey.url, or valkey.enabled=true'],
    ['valkey.enabled=true', 'valkey.enabled needs store.backend=valkey'],
  ] as const)('%s', async ([setting, sentence], context) => {
    await expect(helm(context, 'template', [...engines, '--set', setting])).rejects.toMatchObject({
      stderr: expect.stringContaining(sentence),
    });
  });
});

test('alerts and the dashboard are shipped as they are, where they are wanted', async (context) => {
  const set = ['discovery.selector=app=vllm', 'prometheusRule.enabled=true', 'dashboard.enabled=true'];
  const args = [...set, 'prometheusRule.labels.release=prometheus'].flatMap((each) => ['--set', each]);
  const objects = parseAllDocuments(await helm(context, 'template', args)).map((document): unknown => document.toJS());
  const alerts: unknown = parse(readFileSync(ALERTS_FILE, 'utf8'));
  expect(objects).toContainEqual(
    expect.objectContaining({
      kind: 'PrometheusRule',
      metadata: expect.objectContaining({ labels: expect.objectContaining({ release: 'prometheus' }) }),
      spec: alerts,
    }),
  );
  expect(objects).toContainEqual(
    expect.objectContaining({
      kind: 'ConfigMap',
      metadata: expect.objectContaining({ labels: expect.objectContaining({ grafana_dashboard: '1' }) }),
      data: { 'baton.json': readFileSync(DASHBOARD_FILE, 'utf8') },
    }),
  );
});

describe('the schemas of Kubernetes', () => {
  // The oldest version that the chart names, and the newest that the checker has.
  test.for(['1.27', '1.37'])('of %s fit every manifest', { timeout: 300_000 }, async (version, context) => {
    const check = await checker(context);
    for (const name of CASES) {
      const { out, ok } = await check(version, join(MANIFESTS, `${name}.yaml`));
      // Only what is no part of Kubernetes has no schema there.
      const unknown = out.match(/^WARN .*/gm) ?? [];
      expect(unknown.filter((line) => !line.includes('kind ServiceMonitor '))).toEqual([]);
      expect(out.match(/^ERROR .*/gm) ?? []).toEqual([]);
      expect(ok).toBe(true);
      const objects = readManifests(name).filter(({ kind }) => kind !== 'ServiceMonitor');
      expect(out.match(/^INFO .* passed /gm)).toHaveLength(objects.length);
    }
  });

  test('would refuse a key that is none', { timeout: 300_000 }, async (context) => {
    const check = await checker(context);
    const file = join(scratch, 'wrong.yaml');
    writeFileSync(file, 'apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {selectors: {a: b}}\n');
    expect(await check('1.37', file)).toEqual({
      ok: false,
      out: expect.stringContaining("'selectors' was unexpected"),
    });
  });
});

type Check = (version: string, file: string) => Promise<{ readonly ok: boolean; readonly out: string }>;
let installed: Promise<unknown> | undefined;

/** kubernetes-validate, which brings the schemas of Kubernetes along, from its requirements file. */
async function checker(context: TestContext): Promise<Check> {
  if (!(await hasTool('python3', ['-c', 'import venv, ensurepip']))) skipWithout(context, 'python3 with venv');
  const bin = (name: string) => join(scratch, 'venv', 'bin', name);
  installed ??= run('python3', ['-m', 'venv', join(scratch, 'venv')]).then(() =>
    run(bin('python'), ['-m', 'pip', 'install', '--quiet', '-r', join(CHART, '..', 'requirements.txt')]),
  );
  await installed;
  return (version, file) =>
    run(bin('kubernetes-validate'), ['--strict', '--kubernetes-version', version, file]).then(
      ({ stdout }) => ({ ok: true, out: stdout }),
      ({ stdout }: { stdout: string }) => ({ ok: false, out: stdout }),
    );
}
