/** Sets the version of baton in the chart's Chart.yaml, or in what is rendered from the chart. */
export function setDeployedVersion(text: string, version: string): string {
  return text
    .replaceAll(/^(version|appVersion): .*$/gm, `$1: ${version}`)
    .replaceAll(/^( +app\.kubernetes\.io\/version: )".*"$/gm, `$1"${version}"`)
    .replaceAll(/^( +image: "baton:).*"$/gm, `$1${version}"`);
}
