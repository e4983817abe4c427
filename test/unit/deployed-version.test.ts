import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { expect, test } from 'vitest';
import { setDeployedVersion } from '../../scripts/deployed-version.ts';
import { CASES, CHART, MANIFESTS } from '../support/manifests.ts';

test('a release sets the version wherever the chart and its manifests have it', () => {
  const { version } = JSON.parse(readFileSync('package.json', 'utf8'));
  const files = [join(CHART, 'Chart.yaml'), ...CASES.map((name) => join(MANIFESTS, `${name}.yaml`))];
  for (const file of files) {
    const text = readFileSync(file, 'utf8');
    expect(text.split(version).length, file).toBeGreaterThan(2);
    expect(setDeployedVersion(text, '99.1.0-rc.1')).toBe(text.replaceAll(version, '99.1.0-rc.1'));
  }
});
