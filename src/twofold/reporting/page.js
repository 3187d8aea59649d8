// Unpacks plotly.js from base 85 and gzip, and draws the charts.
const digits = '0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~';
const packed = document.getElementById('plotly'), text = packed.textContent;
const bytes = new DataView(new ArrayBuffer(text.length / 5 * 4));
for (let place = 0; place < text.length; place += 5) {
  let word = 0;
  for (const digit of text.substr(place, 5)) word = word * 85 + digits.indexOf(digit);
  bytes.setUint32(place / 5 * 4, word);
}
const gzip = new Blob([bytes.buffer.slice(0, packed.dataset.bytes)]).stream();
const script = document.createElement('script');
script.text = await new Response(gzip.pipeThrough(new DecompressionStream('gzip'))).text();
document.head.append(script);
const dark = matchMedia('(prefers-color-scheme: dark)').matches;
for (const data of document.querySelectorAll('script[data-picture]')) {
  const picture = JSON.parse(data.textContent), name = data.dataset.picture;
  Plotly.newPlot(name, picture.traces, picture.layout, {responsive: true, displaylogo: false});
  if (dark) Plotly.relayout(name, picture.dark);
}
