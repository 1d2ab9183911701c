;;;; A service and its client, here in one process:
;;;;
;;;;     sbcl --script examples/call.lisp

(require :asdf)
(asdf:load-asd (truename (merge-pathnames "../pelton.asd" *load-truename*)))
(asdf:load-system "pelton")

(let* ((name (format nil "unix:/tmp/pelton-example-~d" (sb-unix:unix-getpid)))
       (service (pelton:open-service name))
       (thread (sb-thread:make-thread
                (lambda ()
                  ;; On two threads. An error becomes CALL-FAILED at the client.
                  (pelton:serve service
                                (lambda (request)
                                  (let ((text (sb-ext:octets-to-string (pelton:request-octets request)
                                                                       :external-format :utf-8)))
                                    (when (string= text "") (error "the request is empty"))
                                    (sb-ext:string-to-octets (string-upcase text) :external-format :utf-8)))
                                :threads 2)))))
  (unwind-protect
       (pelton:with-client (client name :timeout 60)
         (format t "~a~%" (sb-ext:octets-to-string (pelton:call client (sb-ext:string-to-octets "louder") :timeout 60)))
         (handler-case (pelton:call client (pelton:make-octets 0) :timeout 60)
           (pelton:call-failed (condition) (format t "~a~%" condition))))
    (pelton:stop service)
    (sb-thread:join-thread thread)
    (pelton:close-handle service)))
