// Downloads and uploads with Node's http: an agent a connection, which is kept.
"use strict";
const fs = require("fs");
const http = require("http");
const [, port, count, place] = process.argv.slice(2);

function ask(agent, method, path, body) {
	return new Promise((resolve, reject) => {
		const headers = body ? { "Content-Length": body.length } : {};
		const request = http.request({ agent, host: "127.0.0.1", port, method, path, headers }, (answer) => {
			const got = [];
			answer.on("data", (data) => got.push(data));
			answer.on("aborted", () => reject(new Error("aborted")));
			answer.on("end", () => {
				if (answer.statusCode >= 300)
					reject(new Error(`status ${answer.statusCode}`));
				resolve(Buffer.concat(got));
			});
		});
		request.on("error", reject);
		request.end(body);
	});
}

async function talk(number) {
	const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
	while (fs.existsSync(`${place}/wait`))
		await ask(agent, "GET", "/nudge");
	fs.writeFileSync(`${place}/${number}.out`, await ask(agent, "GET", "/large"));
	await ask(agent, "PUT", `/up/${number}`, fs.readFileSync(`${place}/${number}.in`));
	fs.writeFileSync(`${place}/${number}.back`, await ask(agent, "GET", `/up/${number}`));
	agent.destroy();
}

for (let number = 0; number < Number(count); number++)
	talk(number);
