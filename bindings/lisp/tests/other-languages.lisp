;;;; With the others: Rust, by the pelton command, which PELTON_TOOL names; C, by programs in the directory PELTON_C; Go, by PELTON_GO, which is
;;;; not there where Go is not: run-tests says so.

(in-package #:pelton-tests)

(defun tool (arguments &key input (wait t))
  "Runs the pelton command; answers what it has said, or its process."
  (let ((tool (or (sb-posix:getenv "PELTON_TOOL") (error "PELTON_TOOL must name the pelton command: bindings/lisp/run-tests does"))))
    (if wait
        (with-output-to-string (out)
          (let ((process (sb-ext:run-program tool arguments :output out :error out
                                                            :input (and input (make-string-input-stream input)))))
            (unless (eql 0 (sb-ext:process-exit-code process))
              (error "pelton ~{~a~^ ~} has ended with ~d: ~a" arguments (sb-ext:process-exit-code process)
                     (get-output-stream-string out)))))
        (sb-ext:run-program tool arguments :output nil :error nil :wait nil))))

(deftest rust-sends-and-lisp-receives
  (let* ((name (format nil "unix:~a" (in-directory "socket")))
         (thread (in-thread (tool (list "send" name) :input (format nil "one~%two~%three~%"))))
         (received '()))
    (pelton:with-receiver (receiver name :accept t :timeout *patience*)
      (pelton:do-messages (octets receiver :timeout *patience*) (push (text octets) received)))
    (joined thread)
    (is (equal (mapcar (lambda (line) (string-right-trim '(#\Newline) line)) (reverse received)) '("one" "two" "three")))))

(deftest lisp-sends-and-rust-receives
  (let* ((name (format nil "unix:~a" (in-directory "socket")))
         (thread (in-thread (tool (list "recv" name)))))
    (pelton:with-sender (sender name :timeout *patience*)
      (dotimes (i 1000) (pelton:send sender (bytes (format nil "line ~d" i)) :timeout *patience*))
      (pelton:wait-released sender :timeout *patience*))
    (let ((lines (joined thread)))
      (is (eql 1000 (count #\Newline lines)))
      (is (eql 0 (search (format nil "line 0~%line 1~%") lines))))))

(deftest by-a-path-from-lisp-to-rust-and-to-a-record-file
  (let ((name (format nil "path:~a" (in-directory "channel"))) (read '()))
    (pelton:with-sender (sender name :create t)
      (dotimes (i 100) (pelton:send sender (bytes (princ-to-string i)))))
    (tool (list "flush" name (in-directory "log")))
    (pelton:map-record-file (lambda (octets seq) (declare (ignore seq)) (push (text octets) read)) (in-directory "log"))
    (is (equal (reverse read) (loop for i below 100 collect (princ-to-string i))))))

(deftest what-lisp-appends-to-a-file-rust-reads
  (let ((path (in-directory "log")))
    (pelton:with-appenders (appenders (pelton:record-file path))
      (dotimes (i 1000) (pelton:append-message appenders (bytes (format nil "~d" i)))))
    (is (equal (tool (list "cat" path)) (format nil "~{~d~%~}" (loop for i below 1000 collect i))))))

(deftest rust-calls-lisp
  (with-serving ((service-name "s") (lambda (request) (bytes (string-upcase (text (pelton:request-octets request))))))
    (is (search "LOUDER" (tool (list "call" (service-name "s") "louder"))))))

(deftest lisp-calls-rust
  (let ((process (tool (list "serve" (service-name "s") "--exec" "wc -w") :wait nil)))
    (unwind-protect
         (pelton:with-client (client (service-name "s") :timeout *patience*)
           (is (eql 3 (parse-integer (text (pelton:call client (bytes "three small words") :timeout *patience*)) :junk-allowed t))))
      (sb-ext:process-kill process sb-posix:sigterm)
      (sb-ext:process-wait process))))

(deftest a-killed-sender-is-told-and-its-successor-goes-on
  (let ((name (format nil "path:~a" (in-directory "channel"))))
    (pelton:with-receiver (receiver name :create t)
      (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "send" name) :input :stream :output nil :error nil
                                                                                            :wait nil)))
        (format (sb-ext:process-input process) "before~%")
        (finish-output (sb-ext:process-input process))
        (is (search "before" (text (pelton:receive receiver :timeout *patience*))))
        (sb-ext:process-kill process sb-posix:sigkill)
        (sb-ext:process-wait process)
        (signals pelton:peer-died-error (pelton:receive receiver :timeout *patience*)))
      (pelton:with-sender (sender name) (pelton:send sender (bytes "after")))
      (is (equal (text (pelton:receive receiver :timeout *patience*)) "after")))))

(deftest an-end-that-was-told-once-is-told-though-an-interrupt-has-unwound
  (let ((name (format nil "path:~a" (in-directory "channel"))))
    (pelton:with-receiver (receiver name :create t)
      (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "send" name) :input :stream :output nil :error nil
                                                                                            :wait nil)))
        (format (sb-ext:process-input process) "before~%")
        (finish-output (sb-ext:process-input process))
        (is (search "before" (text (pelton:receive receiver :timeout *patience*))))
        (sb-ext:process-kill process sb-posix:sigkill)
        (sb-ext:process-wait process)
        (with-an-interrupt-pending (pelton:receive receiver :timeout *patience*))
        (signals pelton:peer-died-error (pelton:receive receiver :timeout *patience*))
        (signals pelton:timed-out (pelton:receive receiver :timeout 0))))))

(deftest who-waits-for-a-successor-has-what-that-sends
  (let ((name (format nil "unix:~a" (in-directory "socket"))) (processes '()))
    (flet ((sending (line)
             (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "send" name) :input :stream :output nil :error nil
                                                                                                   :wait nil)))
               (format (sb-ext:process-input process) "~a~%" line)
               (finish-output (sb-ext:process-input process))
               (push process processes)
               process))
           (kill (process)
             (sb-ext:process-kill process sb-posix:sigkill)
             (sb-ext:process-wait process)))
      (unwind-protect
           (let ((opening (in-thread (pelton:open-receiver name :accept t :timeout *patience*))))
             (until (probe-file (in-directory "socket")))
             (let* ((first (sending "before")) (receiver (joined opening)) (died 0))
               (is (search "before" (text (pelton:receive receiver :timeout *patience*))))
               (kill first)
               (is (search "after" (text (handler-bind ((pelton:peer-died-error
                                                          (lambda (condition)
                                                            (incf died)
                                                            (sending "after")
                                                            (pelton:resume-channel condition))))
                                           (pelton:receive receiver :timeout *patience*)))))
               (is (eql died 1))
               (kill (first processes))
               (signals pelton:peer-died-error (pelton:receive receiver :timeout *patience*))
               (signals pelton:timed-out (pelton:resume receiver :timeout 0.02))
               (sending "again")
               (pelton:resume receiver :timeout *patience*)
               (is (search "again" (text (pelton:receive receiver :timeout *patience*))))
               (pelton:close-handle receiver)))
        (dolist (process processes)
          (when (sb-ext:process-alive-p process) (kill process)))))))

(deftest a-killed-receiver-is-told-to-who-sends-once
  (let ((name (format nil "path:~a" (in-directory "channel"))) (told 0))
    (pelton:with-sender (sender name :create t :capacity 65536)
      (let ((process (sb-ext:run-program (sb-posix:getenv "PELTON_TOOL") (list "recv" name) :input nil :output nil :error nil :wait nil)))
        (pelton:send sender (bytes "before"))
        (pelton:wait-released sender :timeout *patience*)
        (sb-ext:process-kill process sb-posix:sigkill)
        (sb-ext:process-wait process))
      (loop for end = (handler-case (progn (pelton:send sender (number-octets 1) :timeout 0.05) nil)
                        (pelton:peer-died-error () (incf told) nil)
                        (pelton:timed-out () t))
            until end)
      (is (eql told 1)))))

(defun all-comes-back (program)
  "Sends messages to what PROGRAM is, which sends them back."
  (let* ((there (format nil "unix:~a" (in-directory "there"))) (back (format nil "unix:~a" (in-directory "back")))
         (messages (loop for i below 500 collect (make-array (mod (* i i) 3000) :element-type '(unsigned-byte 8)
                                                                                :initial-element (mod i 256))))
         (receiving (in-thread
                      (pelton:with-receiver (receiver back :accept t :timeout *patience*)
                        (let ((received '()))
                          (pelton:do-messages (octets receiver :timeout *patience*) (push octets received))
                          (nreverse received))))))
    (until (probe-file (in-directory "back")))
    (let ((process (sb-ext:run-program program (list there back) :wait nil :output nil :error nil)))
      (unwind-protect
           (progn
             (pelton:with-sender (sender there :timeout *patience*)
               (dolist (message messages) (pelton:send sender message :timeout *patience*)))
             (is (equalp (joined receiving) messages))
             (sb-ext:process-wait process)
             (is (eql 0 (sb-ext:process-exit-code process))))
        (when (sb-ext:process-alive-p process) (sb-ext:process-kill process sb-posix:sigkill))))))

(defun c-program (name)
  (format nil "~a/~a" (or (sb-posix:getenv "PELTON_C") (error "PELTON_C must name a directory: bindings/lisp/run-tests does")) name))

(deftest c-sends-back-what-lisp-sends
  (all-comes-back (c-program "peer")))

(deftest go-sends-back-what-lisp-sends
  (let ((program (sb-posix:getenv "PELTON_GO")))
    (when program (all-comes-back program))))

(deftest c-and-lisp-call-one-another
  (with-serving ((service-name "s") (lambda (request) (bytes (string-upcase (text (pelton:request-octets request))))))
    (is (search "ASKED" (with-output-to-string (out)
                          (sb-ext:run-program (c-program "call") (list "ask" (service-name "s") "asked") :output out :error out)))))
  (let ((process (sb-ext:run-program (c-program "call") (list "serve" (service-name "c")) :wait nil :output nil :error nil)))
    (unwind-protect
         (pelton:with-client (client (service-name "c") :timeout *patience*)
           (is (equal (text (pelton:call client (bytes "echo") :timeout *patience*)) "echo")))
      (sb-ext:process-kill process sb-posix:sigkill)
      (sb-ext:process-wait process))))

(deftest c-and-lisp-read-one-anothers-record-files
  (let ((ours (in-directory "ours")) (theirs (in-directory "theirs")) (read 0))
    (pelton:with-appenders (appenders (pelton:record-file ours))
      (pelton:append-message appenders (bytes "a line of Lisp's")))
    (is (search "a line of Lisp's" (with-output-to-string (out)
                                     (sb-ext:run-program (c-program "append") (list ours) :output out :error out))))
    (sb-ext:run-program (c-program "append") (list theirs "2" "100"))
    (is (eq :end (pelton:map-record-file (lambda (octets seq) (declare (ignore seq)) (when (search "line" (text octets)) (incf read)))
                                         theirs)))
    (is (eql read 200))))
